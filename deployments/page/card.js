/** One answer on the page: its tokens as they come, its speed, its end. */

import { Answer } from "./answer.js";
import { ApiError } from "./api.js";
import { make } from "./dom.js";
import { Ink } from "./ink.js";
import { summary } from "./statistics.js";
import { orDash } from "./words.js";

export class Card {
  /**
   * @param {string} title
   * @param {{prompt?: string, monospace?: boolean, changed: (card: Card) => void}} options prompt: text that the answer
   *   goes on from, shown before it; changed: called when there is something new to see
   */
  constructor(title, { prompt = "", monospace = false, changed }) {
    this.answer = new Answer(performance.now());
    this._changed = changed;
    const keys = { role: "group", tabIndex: 0, "aria-label": "Tokens of the answer; arrow keys tell about each" };
    const tokens = make("span", { className: "tokens", ...keys });
    this._ink = new Ink(tokens, () => this._drawn());
    this._speed = make("span", { className: "speed", "aria-hidden": "true" });
    this._foot = make("p", { className: "facts summary" });
    this._actions = make("div", { className: "card-actions" });
    const head = make("div", { className: "card-head" }, make("h3", { textContent: title }), this._speed);
    const given = prompt ? [make("span", { className: "prompt", textContent: prompt })] : [];
    this._text = make("div", { className: `card-text${monospace ? " monospace" : ""}` }, ...given, tokens);
    this.element = make("article", { className: "card running", "aria-busy": "true" }, head, this._text, this._foot);
    this.element.append(this._actions);
  }

  /** Streams the answer; what goes wrong stays with it. */
  async run(api, path, body, signal) {
    this.answer.beganMs = performance.now();
    this.say("");
    try {
      for await (const document of api.stream(path, body, { signal, opened: (headers) => this._opened(headers) })) {
        const added = this.answer.take(document, performance.now());
        if (added.length) this._ink.add(added);
        if (this.answer.progress) this.say(inProgress(this.answer.progress));
      }
    } catch (error) {
      if (error.name === "AbortError") this.answer.stopped = true;
      else this.answer.error = error instanceof ApiError ? error : new ApiError(String(error));
    }
    this._end();
  }

  /** Adds a button below the answer. */
  offer(label, act) {
    const button = make("button", { type: "button", className: "quiet", textContent: label });
    button.addEventListener("click", act);
    this._actions.append(button);
  }

  /** Shows words below the answer, until it ends. */
  say(words) {
    this._foot.textContent = words;
  }

  markFrom(at) {
    this._ink.markFrom(at);
  }

  _opened(headers) {
    this.answer.cached = headers.get("X-Consort-Cache") === "hit";
  }

  _end() {
    this.answer.settle();
    this._ink.settle();
    this.element.classList.remove("running");
    this.element.removeAttribute("aria-busy");
    this._foot.textContent = summary(this.answer);
    if (this.answer.error) this._foot.before(problem(this.answer.error));
  }

  _drawn() {
    const { tokensPerS, cached } = this.answer;
    if (Number.isFinite(tokensPerS)) this._speed.textContent = cached ? "cached" : `${orDash(tokensPerS, 1)} tokens/s`;
    this._changed(this);
  }
}

function inProgress({ event, model, done, total, error }) {
  const what = error ? `failed: ${error}` : event;
  return `${model}: ${what}, ${done} of ${total}`;
}

/** An error as people read it. */
export function problem(error) {
  const retry = error.retryAfterS ? ` Try again in ${error.retryAfterS} s.` : "";
  return make("p", { className: "problem", role: "alert" }, make("b", { textContent: error.title }), `: ${error.message}${retry}`);
}
