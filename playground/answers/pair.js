/** Two answers to one request side by side: with drafts, and by the target alone. */

import { Choices } from "./choices.js";
import { make } from "../common/dom.js";
import { compareTexts } from "./difference.js";
import { restsOf } from "./rests.js";

const SEEDS = 2 ** 31;

export class Pair {
  /** @param {{race: boolean, coupled: boolean, why?: string}} way at once or in turn; whether the texts should be equal;
   *    why drafts rested, if that is known already
   *  @param {object} options see Choices; whyRests: async, returns why drafts rest now */
  constructor(way, { changed, answers = [], whyRests = async () => "", ...options }) {
    Object.assign(this, { _way: way, _whyRests: whyRests });
    const both = {
      ...options,
      changed: (card) => {
        this._showSpeeds();
        changed(card);
      },
    };
    this._ours = new Choices("With drafts", 1, { ...both, answers: answers.slice(0, 1) });
    this._plain = new Choices("Target alone", 1, { ...both, answers: answers.slice(1) });
    this.chosen = this._ours.chosen;
    this.cards = [this._ours.chosen, this._plain.chosen];
    this._bars = this.cards.map((card) => {
      const bar = make("span", { className: "race-bar" });
      card.head.after(make("div", { className: "race", "aria-hidden": "true" }, bar));
      return bar;
    });
    this._verdict = make("p", { className: "verdict", role: "status" });
    const columns = make("div", { className: "pair" }, ...this.cards.map(({ element }) => element));
    this.element = make("div", { className: "comparison" }, columns, this._verdict);
  }

  /** Runs both requests with the same seed, a new one if the body has none. */
  async run(api, path, body, signal) {
    const seeded = { seed: Math.floor(Math.random() * SEEDS), ...body };
    const [ours, plain] = this.cards;
    const alone = () => this._plain.run(api, path, { ...seeded, speculate: false }, signal);
    const drafted = this._ours.run(api, path, { ...seeded, speculate: true }, signal);
    if (this._way.race) await Promise.all([drafted, alone()]);
    else {
      plain.say("Waits for its turn.");
      await drafted;
      if (ours.answer.error === null) await alone();
      else plain.element.remove();
    }
    const rested = ours.answer.speculation?.drafted === 0 || restsOf(ours.answer) !== "";
    this._way.why ??= rested ? await this._whyRests() : "";
    this._compare();
  }

  /** Shows two answers that are complete. */
  end() {
    this._ours.end();
    this._plain.end();
    this._showSpeeds();
    this._compare();
  }

  choose() {} // the conversation goes on with the first

  _compare() {
    const answers = this.cards.map(({ answer }) => answer);
    if (answers.some(({ finish, error }) => finish === null || error !== null)) return;
    const { same, index, words } = compareTexts(...answers, this._way.coupled);
    this._verdict.classList.add(same ? "same" : "different");
    this._verdict.textContent = [words, this._way.why].filter(Boolean).join(" ");
    if (!same) for (const card of this.cards) card.markFrom(index);
  }

  _showSpeeds() {
    const speeds = this.cards.map(({ answer }) => answer.tokensPerS || 0);
    const most = Math.max(...speeds, 1);
    this._bars.forEach((bar, index) => {
      bar.style.width = `${(100 * speeds[index]) / most}%`;
    });
  }
}
