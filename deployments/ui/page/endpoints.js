/** The endpoint picker: what there is to ask, and whether it is up. */

import { ApiError } from "./api.js";
import { problem } from "./card.js";
import { number } from "./words.js";

const AGAIN_MS = 2000;

export class Endpoints {
  /**
   * @param {HTMLSelectElement} picker  @param {HTMLElement} facts where the chosen one is described
   * @param {() => void} unauthorized called where the server wants a key
   */
  constructor(api, picker, facts, unauthorized) {
    Object.assign(this, { _api: api, _picker: picker, _facts: facts, _unauthorized: unauthorized });
    this._models = [];
    this._timer = 0;
    this.changed = () => {}; // called when another one is chosen
    picker.addEventListener("change", () => this._describe());
  }

  /** The chosen one's card, as GET /v1/models has it. */
  get chosen() {
    return this._models.find(({ id }) => id === this._picker.value);
  }

  /** Whether tokens of the chosen one's answers are blended from several models'. */
  get blends() {
    return (this.chosen?.members?.length ?? 0) > 1 && !this.chosen.strategy;
  }

  /** Asks the server, and again as long as something is not up. */
  async load() {
    clearTimeout(this._timer);
    try {
      this._show(await this._api.models());
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this._facts.replaceChildren(problem(error));
      if (error.status === 401) return this._unauthorized();
      this._later();
    }
  }

  _show(models) {
    const chosen = this._picker.value;
    this._models = models;
    this._picker.replaceChildren(...models.map(({ id }) => new Option(id, id, false, id === chosen)));
    this._describe();
    if (!models.every(({ ready = true }) => ready)) this._later();
  }

  _describe() {
    this._facts.textContent = this.chosen ? described(this.chosen) : "There is no endpoint.";
    if (this.chosen?.id === this._described) return;
    this._described = this.chosen?.id;
    this.changed();
  }

  _later() {
    this._timer = setTimeout(() => this.load(), AGAIN_MS);
  }
}

function described({ target, members, strategy, drafter, ngram, draft_length: length, context_length: context, ready = true }) {
  const parts = [
    !ready && "still loading",
    members?.length > 1 ? `members ${members.join(", ")}` : target && `target ${target}`,
    strategy && `strategy ${strategy}`,
    drafter && `drafter ${drafter}`,
    ngram && "n-gram drafts",
    length && `γ ${length}`,
    context && `context ${number(context)}`,
  ];
  return parts.filter(Boolean).join(" · ");
}
