/** One answer on the page: text, calls, speed and statistics. */

import { button, make } from "../dom.js";
import { summary } from "../figures/statistics.js";
import { orDash } from "../format.js";
import { Answer } from "./answer.js";
import { Calls } from "./calls.js";
import { AnswerText, tokensElement, WrittenView } from "./text.js";

export class Card {
  /**
   * options: `prompt`, which the answer continues; `monospace`; `formatted`, whether to read Markdown; `changed(card)`,
   * called after every change. choice: see Answer. answer: a complete one.
   */
  constructor(title, options, choice, answer = new Answer(performance.now(), choice)) {
    this.answer = answer;
    this.calls = new Calls();
    this._text = new AnswerText(answer, options, () => {
      if (answer.tokensPerS) this._speed.textContent = answer.cached ? "cached" : `${orDash(answer.tokensPerS, 1)} tokens/s`;
      options.changed(this);
    });
    this._proposals = make("div", { className: "proposals" }); // members' answers, which the answer was written from
    this._speed = make("span", { className: "speed", "aria-hidden": "true" });
    this._foot = make("p", { className: "facts summary" });
    this._actions = make("div", { className: "actions row" });
    this.head = make("div", { className: "card-head row apart" }, make("h3", { textContent: title }), this._speed);
    const parts = [this.head, this._proposals, this._text.element, this.calls.element, this._foot, this._actions];
    this.element = make("article", { className: "card box", "aria-busy": "true" }, ...parts);
  }

  begin() {
    this.answer.begin(performance.now());
    this.element.setAttribute("aria-busy", "true");
    this.element.querySelector(".problem")?.remove();
    this._actions.replaceChildren();
    this.say("");
  }

  /** Takes in a document of the stream. */
  take(document) {
    if (this.answer.take(document, performance.now())) this._text.update();
    const { calls, progress } = this.answer;
    if (calls.length) this.calls.show(calls);
    if (!progress) return;
    this._addProposal(progress);
    const { event, model, done, total, error } = progress;
    this.say(`${model}: ${error ? `failed: ${error}` : event}, ${done} of ${total}`);
  }

  /** Ends the answer, and shows its error if it has one. */
  end() {
    const { answer } = this;
    answer.settle();
    if (answer.calls.length) this._addOriginal();
    if (answer.ensemble?.candidates) {
      this._proposals.replaceChildren();
      for (const candidate of answer.ensemble.candidates) this._addProposal(candidate);
    }
    this._text.settle();
    this.element.removeAttribute("aria-busy");
    this.say(summary(answer));
    if (answer.error) this._foot.before(problem(answer.error));
  }

  /** Shows the text formatted, or as written. */
  show(formatted) {
    if (!this.answer.calls.length) this._text.show(formatted);
  }

  /** Adds a button below the answer. */
  offer(label, act) {
    const added = button(label, act);
    this._actions.append(added);
    return added;
  }

  /** Adds an element beside the buttons. */
  add(element) {
    this._actions.append(element);
  }

  /** Shows a text below the answer until it ends. */
  say(words) {
    this._foot.textContent = words;
  }

  markFrom(index) {
    this.answer.markFrom(index);
    this._text.redraw();
  }

  _addProposal({ model, text }) {
    if (typeof text !== "string") return; // nobody wrote from it
    const [summary, shown] = [make("summary", { textContent: model }), make("div", { className: "card-text", textContent: text })];
    this._proposals.append(make("details", { className: "raw" }, summary, shown));
  }

  /** Shows the text beside the calls, and all tokens as details. */
  _addOriginal() {
    this.calls.show(this.answer.calls);
    this._text.show(true);
    const tokens = tokensElement("Tokens of the answer with its calls");
    new WrittenView(tokens).draw(this.answer.tokens);
    const summary = make("summary", { textContent: "As the model wrote it" });
    this._text.element.after(make("details", { className: "raw" }, summary, make("div", { className: "card-text" }, tokens)));
  }
}

/** An element that shows an error. */
export function problem(error) {
  const retry = error.retryAfterS ? ` Try again in ${error.retryAfterS} s.` : "";
  return make("p", { className: "problem", role: "alert" }, make("b", { textContent: error.title }), `: ${error.message}${retry}`);
}
