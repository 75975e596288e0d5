/** Two answers to one request side by side: with drafts, and by the target alone. */

import { make } from "../dom.js";
import { restsOf } from "../figures/speculation.js";
import { number } from "../format.js";
import { Choices } from "./choices.js";

const SEEDS = 2 ** 31;

export class Pair {
  /**
   * way: `race`, at once or in turn; `coupled`, whether the texts should be equal; `why` drafts rested, if that is known
   * already. options: see Choices; `whyRests`, async, returns why drafts rest now. answers: complete ones.
   */
  constructor(way, options, answers = []) {
    Object.assign(this, { _way: way, _whyRests: options.whyRests });
    this._ours = new Choices("With drafts", 1, options, answers.slice(0, 1));
    this._plain = new Choices("Target alone", 1, options, answers.slice(1));
    this.chosen = this._ours.chosen;
    this.cards = [this._ours.chosen, this._plain.chosen];
    this._verdict = make("p", { className: "verdict box", role: "status" });
    const columns = make("div", { className: "columns-of-answers" }, ...this.cards.map(({ element }) => element));
    this.element = make("div", {}, columns, this._verdict);
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
    this._compare();
  }

  choose() {} // the conversation goes on with the first

  _compare() {
    const [ours, plain] = this.cards.map(({ answer }) => answer);
    if ([ours, plain].some(({ finish, error }) => finish === null || error !== null)) return;
    const index = firstDifference(ours.written, plain.written);
    const words = index < 0 ? sameText(ours, plain) : differentText(index, this._way.coupled);
    this._verdict.classList.add(index < 0 ? "same" : "different");
    this._verdict.textContent = [words, this._way.why].filter(Boolean).join(" ");
    if (index >= 0) for (const card of this.cards) card.markFrom(index);
  }
}

/** The index of the first difference between two texts; -1 if there is none. */
function firstDifference(left, right) {
  if (left === right) return -1;
  let index = 0;
  while (index < Math.min(left.length, right.length) && left[index] === right[index]) index++;
  return index;
}

function differentText(index, coupled) {
  const reason = coupled
    ? "rounding differs between batch shapes, which can tip a close choice"
    : "rejection sampling keeps the distribution, not the text";
  return `The texts differ from character ${index + 1} on: ${reason}.`;
}

function sameText(ours, plain) {
  const rests = ours.speculation?.drafted ? restsOf(ours) : "";
  return `Same text${speedUp(ours, plain)}${rests && `; ${rests}`}.`;
}

function speedUp(ours, plain) {
  const ratio = ours.tokensPerS / plain.tokensPerS;
  if (ours.cached || plain.cached) return "; one came from the server's cache, so their speeds say nothing";
  if (!Number.isFinite(ratio)) return "";
  if (ours.speculation?.drafted === 0) return `; no drafts ran, so the difference in speed, ${number(ratio, 2)} ×, is not theirs`;
  return ratio < 1 ? `; this time drafts cost speed, ${number(ratio, 2)} ×` : `, ${number(ratio, 2)} × as fast with drafts`;
}
