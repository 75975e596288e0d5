/** One answer on the page: tokens, calls, speed and statistics. */

import { Answer } from "./answer.js";
import { Calls } from "./calls.js";
import { make } from "../common/dom.js";
import { TokenView } from "./tokens.js";
import { summary } from "../figures/statistics.js";
import { orDash } from "../common/format.js";

export class Card {
  /**
   * @param {string} title
   * @param {object} options
   * @param {string} [options.prompt] text that the answer continues, shown before it
   * @param {boolean} [options.monospace]
   * @param {(card: Card) => void} options.changed called after every change
   * @param {{index: number, alone: boolean}} [options.choice] see Answer
   */
  constructor(title, { prompt = "", monospace = false, changed, choice }) {
    this.answer = new Answer(performance.now(), choice);
    this.calls = new Calls();
    this._changed = changed;
    const keys = { role: "group", tabIndex: 0, "aria-label": "Tokens of the answer; arrow keys describe each" };
    const tokens = make("span", { className: "tokens", ...keys });
    this._tokens = new TokenView(tokens, () => this._drawn());
    this._speed = make("span", { className: "speed", "aria-hidden": "true" });
    this._foot = make("p", { className: "facts summary" });
    this._actions = make("div", { className: "card-actions" });
    this.head = make("div", { className: "card-head" }, make("h3", { textContent: title }), this._speed);
    const given = prompt ? [make("span", { className: "prompt", textContent: prompt })] : [];
    this._text = make("div", { className: `card-text${monospace ? " monospace" : ""}` }, ...given, tokens);
    this.element = make("article", { className: "card running", "aria-busy": "true" }, this.head, this._text);
    this.element.append(this.calls.element, this._foot, this._actions);
  }

  begin() {
    this.answer.beganMs = performance.now();
    this.say("");
  }

  /** Takes in a document of the stream. */
  take(document) {
    const added = this.answer.take(document, performance.now());
    if (added.length) this._tokens.add(added);
    if (this.answer.calls.length) this.calls.show(this.answer.calls);
    if (this.answer.progress) this.say(inProgress(this.answer.progress));
  }

  /** Ends the answer, and shows its error if it has one. */
  end() {
    const { answer } = this;
    answer.settle();
    this._tokens.settle();
    if (answer.calls.length) this._putAside();
    this.element.classList.remove("running");
    this.element.removeAttribute("aria-busy");
    this._foot.textContent = summary(answer);
    if (answer.error) this._foot.before(problem(answer.error));
  }

  /** Adds a button below the answer. */
  offer(label, act) {
    const button = make("button", { type: "button", className: "quiet", textContent: label });
    button.addEventListener("click", act);
    this._actions.append(button);
  }

  /** Shows a text below the answer until it ends. */
  say(words) {
    this._foot.textContent = words;
  }

  markFrom(index) {
    this._tokens.markFrom(index);
  }

  /** Replaces tokens that were calls by the text beside them; they stay available as details. */
  _putAside() {
    const text = this.answer.text.trim();
    const words = text ? [make("p", { className: "card-text", textContent: text })] : [];
    const raw = make("details", { className: "raw" }, make("summary", { textContent: "As the model wrote it" }));
    this._text.replaceWith(...words, raw);
    raw.append(this._text);
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

/** An element that shows an error. */
export function problem(error) {
  const retry = error.retryAfterS ? ` Try again in ${error.retryAfterS} s.` : "";
  return make("p", { className: "problem", role: "alert" }, make("b", { textContent: error.title }), `: ${error.message}${retry}`);
}
