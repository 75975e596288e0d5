/** Two answers to one request side by side: with drafts, and by the target alone. */

import { Card } from "./card.js";
import { make } from "./dom.js";
import { verdict } from "./verdict.js";

export class Pair {
  /** @param {object} options see Card */
  constructor({ changed, ...options }) {
    const both = {
      ...options,
      changed: (card) => {
        this._race();
        changed(card);
      },
    };
    this.ours = new Card("With drafts", both);
    this.plain = new Card("Target alone", both);
    this._bars = [this.ours, this.plain].map((card) => {
      const bar = make("span", { className: "race-bar" });
      card.element.querySelector(".card-head").after(make("div", { className: "race", "aria-hidden": "true" }, bar));
      return bar;
    });
    this._verdict = make("p", { className: "verdict", role: "status" });
    const columns = make("div", { className: "pair" }, this.ours.element, this.plain.element);
    this.element = make("div", { className: "comparison" }, columns, this._verdict);
  }

  /** Both answers; race: at once, otherwise one after the other. */
  async run(api, path, body, signal, { race, coupled }) {
    const alone = () => this.plain.run(api, path, { ...body, speculate: false }, signal);
    const drafted = this.ours.run(api, path, { ...body, speculate: true }, signal);
    if (race) await Promise.all([drafted, alone()]);
    else {
      this.plain.say("Waits for its turn.");
      await drafted;
      if (this.ours.answer.error === null) await alone();
      else this.plain.element.remove();
    }
    this._judge(coupled);
  }

  _judge(coupled) {
    const answers = [this.ours.answer, this.plain.answer];
    if (answers.some(({ finish, error }) => finish === null || error !== null)) return;
    const { same, at, words } = verdict(...answers, coupled);
    this._verdict.classList.add(same ? "same" : "different");
    this._verdict.textContent = words;
    if (!same) for (const card of [this.ours, this.plain]) card.markFrom(at);
  }

  _race() {
    const speeds = [this.ours, this.plain].map(({ answer }) => answer.tokensPerS || 0);
    const most = Math.max(...speeds, 1);
    this._bars.forEach((bar, index) => {
      bar.style.width = `${(100 * speeds[index]) / most}%`;
    });
  }
}
