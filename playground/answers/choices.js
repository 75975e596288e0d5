/** The answers to one request, side by side. The conversation continues with the chosen one. */

import { make } from "../dom.js";
import { together } from "../figures/statistics.js";
import { ApiError } from "../request/api.js";
import { Card } from "./card.js";

let groups = 0;

export class Choices {
  /** options: see Card; `proposes`, whether the endpoint has drafts. answers: complete ones. */
  constructor(title, count, options, answers = []) {
    const alone = count === 1;
    this.cards = Array.from({ length: count }, (_, index) => {
      const name = alone ? title : `${title}, ${index + 1} of ${count}`;
      return new Card(name, options, { index, alone }, answers[index]);
    });
    this.chosen = this.cards[0];
    this._proposes = options.proposes;
    this.element = alone ? this.chosen.element : this._sideBySide(options.changed);
  }

  /** Streams the answers. Errors are shown with them. */
  async run(api, path, body, signal) {
    this.cards.forEach((card) => card.begin());
    const answers = this.cards.map(({ answer }) => answer);
    for (const answer of answers) answer.speculates = this._proposes && body.speculate !== false;
    const opened = (headers) => answers.forEach((answer) => (answer.cached = headers.get("X-Consort-Cache") === "hit"));
    try {
      for await (const document of api.stream(path, body, { signal, opened }))
        for (const card of this.cards) card.take(document);
    } catch (error) {
      this._fail(error);
    }
    this.end();
  }

  /** Shows what is known when all answers are complete. */
  end() {
    this.cards.forEach((card) => card.end());
    if (this._foot) this._foot.textContent = together(this.cards.map(({ answer }) => answer));
  }

  /** Goes on with another answer. */
  choose(index) {
    this.chosen = this.cards[index];
    const radio = this.chosen.head.querySelector(".choose input");
    if (radio) radio.checked = true;
  }

  _fail(error) {
    const { title, message, status, param, retryAfterS } = error instanceof ApiError ? error : new ApiError(String(error));
    for (const { answer } of this.cards) {
      if (!answer.alone && answer.finish !== null) continue; // it is complete
      if (error.name === "AbortError") answer.stopped = true;
      else answer.error = { title, message, status, param, retryAfterS };
    }
    if (status) for (const card of this.cards.slice(1)) card.element.remove(); // refused: show the error once
  }

  _sideBySide(changed) {
    const group = `choice-${++groups}`;
    this.cards.forEach((card, index) => {
      const radio = make("input", { type: "radio", name: group, checked: index === 0 });
      radio.addEventListener("change", () => {
        this.chosen = card;
        changed(card);
      });
      card.head.prepend(make("label", { className: "choose" }, radio, "Choose"));
    });
    this._foot = make("p", { className: "facts together" });
    const columns = make("div", { className: "columns-of-answers" }, ...this.cards.map(({ element }) => element));
    return make("div", { role: "group", "aria-label": "Answers to choose from" }, columns, this._foot);
  }
}
