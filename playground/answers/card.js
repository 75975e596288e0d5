/** One answer on the page: text, calls, speed and statistics. */

import { Answer } from "./answer.js";
import { AnswerText } from "./answer_text.js";
import { Calls } from "./calls.js";
import { make } from "../common/dom.js";
import { WrittenView } from "./written_view.js";
import { summary } from "../figures/statistics.js";
import { orDash } from "../common/format.js";

export class Card {
  /**
   * @param {string} title
   * @param {object} options
   * @param {string} [options.prompt] text that the answer continues, shown before it
   * @param {boolean} [options.monospace]
   * @param {boolean} [options.formatted] whether to read Markdown
   * @param {(card: Card) => void} options.changed called after every change
   * @param {{index: number, alone: boolean}} [options.choice] see Answer
   * @param {Answer} [options.answer] a complete one
   */
  constructor(title, { prompt = "", monospace = false, formatted = false, changed, choice, answer }) {
    this.answer = answer ?? new Answer(performance.now(), choice);
    this.calls = new Calls();
    this._changed = changed;
    const text = { prompt, monospace, formatted, drawn: () => this._drawn() };
    this._text = new AnswerText(this.answer, text);
    this._speed = make("span", { className: "speed", "aria-hidden": "true" });
    this._foot = make("p", { className: "facts summary" });
    this._actions = make("div", { className: "card-actions" });
    this.head = make("div", { className: "card-head" }, make("h3", { textContent: title }), this._speed);
    this.element = make("article", { className: "card running", "aria-busy": "true" }, this.head, this._text.element);
    this.element.append(this.calls.element, this._foot, this._actions);
  }

  begin() {
    this.answer.begin(performance.now());
    this.element.classList.add("running");
    this.element.setAttribute("aria-busy", "true");
    this.element.querySelector(".problem")?.remove();
    this._actions.replaceChildren();
    this.say("");
  }

  /** Takes in a document of the stream. */
  take(document) {
    const added = this.answer.take(document, performance.now());
    if (added.length) this._text.update();
    if (this.answer.calls.length) this.calls.show(this.answer.calls);
    if (this.answer.progress) this.say(inProgress(this.answer.progress));
  }

  /** Ends the answer, and shows its error if it has one. */
  end() {
    const { answer } = this;
    answer.settle();
    if (answer.calls.length) this._addOriginal();
    this._text.settle();
    this.element.classList.remove("running");
    this.element.removeAttribute("aria-busy");
    this._foot.textContent = summary(answer);
    if (answer.error) this._foot.before(problem(answer.error));
  }

  /** Shows the text formatted, or as written. */
  show(formatted) {
    if (!this.answer.calls.length) this._text.show(formatted);
  }

  /** Adds a button below the answer. */
  offer(label, act) {
    const button = make("button", { type: "button", className: "quiet", textContent: label });
    button.addEventListener("click", act);
    this._actions.append(button);
    return button;
  }

  /** Shows a text below the answer until it ends. */
  say(words) {
    this._foot.textContent = words;
  }

  markFrom(index) {
    this.answer.markFrom(index);
    this._text.redraw();
  }

  /** Shows the text beside the calls, and all tokens as details. */
  _addOriginal() {
    this.calls.show(this.answer.calls);
    this._text.show(true);
    const tokens = make("div", { className: "tokens", role: "group", tabIndex: 0, "aria-label": "Tokens of the answer with its calls" });
    new WrittenView(tokens).draw(this.answer.tokens);
    const original = make("div", { className: "card-text" }, tokens);
    this._text.element.after(make("details", { className: "raw" }, make("summary", { textContent: "As the model wrote it" }), original));
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
