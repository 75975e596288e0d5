/** An exchange on the page: the question, its answers, and what can be done with them. */

import { Choices } from "../answers/choices.js";
import { Pair } from "../answers/pair.js";
import { copies } from "../common/clipboard.js";
import { make } from "../common/dom.js";
import { edit } from "./editor.js";

export class ExchangeView {
  /**
   * @param {import("./conversation.js").Exchange} exchange
   * @param {number} count of answers
   * @param {object} options see Choices and Pair
   * @param {object} acts what to do on its buttons: `ask(text)`, `goOn()`, `rewrite(text)`, `version(index)`, `chosen()`
   */
  constructor(exchange, count, options, acts) {
    Object.assign(this, { exchange, _acts: acts });
    const { way, answers, text } = exchange;
    const shown = { ...options, answers };
    this.shown = way ? new Pair(way, shown) : new Choices(exchange.model, count, shown);
    const question = text ? [this._question(text)] : [];
    this._versions = make("span", { className: "versions", hidden: true });
    this.element = make("section", { className: "exchange" }, ...question, this.shown.element);
    if (answers.length) this.shown.end();
    this.shown.choose(exchange.chosen);
    this.shown.cards.forEach((card, index) => card.head.addEventListener("change", () => this._choose(index)));
  }

  /** Keeps the answers, and offers what can be done with them. */
  end() {
    this.exchange.answers = this.shown.cards.map(({ answer }) => answer);
    const cards = this.shown.cards.filter(({ element }) => this.element.contains(element));
    const card = cards.at(-1);
    const { chosen } = this.shown;
    this._goOn = !this.exchange.way && chosen.answer.isCut ? card.offer("Continue", () => this._acts.goOn()) : null;
    card.offer("Regenerate", () => this._acts.ask(this.exchange.text));
    if (!this.exchange.way && this.shown.cards.length === 1)
      card.offer("Edit", () =>
        edit(card.element, { text: chosen.answer.text, label: "The answer", save: "Keep", done: this._acts.rewrite }),
      );
    for (const each of cards) copies(each.offer("Copy", () => {}), () => each.answer.text);
    card.element.querySelector(".card-actions").append(this._versions);
  }

  /** Tells which of several versions this is. */
  showVersions(index, count) {
    this._versions.hidden = count < 2;
    const step = (label, sign, to) => {
      const button = make("button", { type: "button", className: "quiet", textContent: sign, "aria-label": label });
      button.disabled = to < 0 || to >= count;
      button.addEventListener("click", () => this._acts.version(to));
      return button;
    };
    const words = make("span", { className: "facts", textContent: `${index + 1} of ${count}` });
    this._versions.replaceChildren(step("Earlier version", "‹", index - 1), words, step("Later version", "›", index + 1));
  }

  /** Fixes the choice and the answer once the conversation goes on, and shows whether calls wait for results. act: sends them. */
  showLast(isLast, act) {
    if (this._goOn) this._goOn.hidden = !isLast;
    for (const radio of this.element.querySelectorAll(".choose input")) radio.disabled = !isLast;
    for (const card of this.shown.cards) {
      if (isLast && card === this.shown.chosen && card.answer.calls.length) card.calls.offer(act);
      else card.calls.close();
    }
  }

  _choose(index) {
    this.exchange.chosen = index;
    this._acts.chosen();
  }

  _question(text) {
    const words = make("div", { className: "asked", textContent: text });
    const change = make("button", { type: "button", className: "quiet", textContent: "Edit", "aria-label": "Edit the question" });
    const question = make("div", { className: "question-row" }, change, words);
    change.addEventListener("click", () =>
      edit(question, { text, label: "The question", save: "Ask again", done: (changed) => this._acts.ask(changed) }),
    );
    return question;
  }
}
