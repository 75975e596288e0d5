/** An exchange on the page: the question, its answers, and what can be done with them. */

import { Choices } from "../answers/choices.js";
import { Pair } from "../answers/pair.js";
import { button, copies, facts, make } from "../dom.js";

const MOST_ROWS = 16; // of an editor

export class ExchangeView {
  /** count: of answers. options: see Choices and Pair. acts: `ask(text)`, `goOn()`, `rewrite(text)`, `version(index)`, `chosen()`. */
  constructor(exchange, count, options, acts) {
    Object.assign(this, { exchange, _acts: acts });
    const { way, answers, text, model } = exchange;
    this.shown = way ? new Pair(way, options, answers) : new Choices(model, count, options, answers);
    const question = text ? [this._question(text)] : [];
    this._versions = make("span", { className: "versions row", hidden: true });
    this.element = make("section", {}, ...question, this.shown.element);
    if (answers.length) this.shown.end();
    this.shown.choose(exchange.chosen);
    this.shown.cards.forEach((card, index) => card.head.addEventListener("change", () => this._choose(index)));
  }

  /** Keeps the answers, and offers what can be done with them. */
  end() {
    this.exchange.answers = this.shown.cards.map(({ answer }) => answer);
    const cards = this.shown.cards.filter(({ element }) => this.element.contains(element));
    const card = cards.at(-1);
    const { answer } = this.shown.chosen;
    const { way, text } = this.exchange;
    this._goOn = !way && answer.isCut ? card.offer("Continue", () => this._acts.goOn()) : null;
    card.offer("Regenerate", () => this._acts.ask(text));
    if (!way && this.shown.cards.length === 1)
      card.offer("Edit", () => edit(card.element, answer.text, { label: "The answer", save: "Keep" }, this._acts.rewrite));
    for (const each of cards) copies(each.offer("Copy", () => {}), () => each.answer.text);
    card.add(this._versions);
  }

  /** Tells which of several versions this is. */
  showVersions(index, count) {
    this._versions.hidden = count < 2;
    const step = (label, sign, to) =>
      button(sign, () => this._acts.version(to), { "aria-label": label, disabled: to < 0 || to >= count });
    const words = facts(`${index + 1} of ${count}`);
    this._versions.replaceChildren(step("Earlier version", "‹", index - 1), words, step("Later version", "›", index + 1));
  }

  /** Fixes the choice once the conversation goes on, and shows whether calls wait for results. act: sends them. */
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
    const words = { label: "The question", save: "Ask again" };
    const change = button("Edit", () => edit(question, text, words, this._acts.ask), { "aria-label": "Edit the question" });
    const question = make("div", { className: "question-row" }, change, make("div", { className: "asked", textContent: text }));
    return question;
  }
}

/** Replaces an element by an editor of a text until it is left, or saved, which calls `done` with the new text. */
function edit(element, text, { label, save }, done) {
  const back = document.activeElement;
  const rows = Math.min(text.split("\n").length + 1, MOST_ROWS);
  const area = make("textarea", { value: text, rows, "aria-label": label, spellcheck: false });
  const leave = () => {
    form.replaceWith(element);
    back?.focus();
  };
  const submit = make("button", { type: "submit", className: "main quiet", textContent: save });
  const form = make("form", { className: "editor" }, area, make("div", { className: "actions row" }, button("Cancel", leave), submit));
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    if (event.key !== "Escape") return;
    event.stopPropagation();
    leave();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    leave();
    if (area.value.trim() !== "") done(area.value);
  });
  element.replaceWith(form);
  area.focus();
}
