/** The endpoint picker: the server's endpoints, and whether they are ready. */

import { ApiError } from "./api.js";
import { problem } from "../answers/card.js";
import { number } from "../common/format.js";

const RETRY_MS = 2000;

export class Endpoints {
  /**
   * @param {HTMLSelectElement} picker  @param {HTMLElement} facts describes the chosen endpoint
   * @param {() => void} unauthorized called if the server needs a key
   */
  constructor(api, picker, facts, unauthorized) {
    Object.assign(this, { _api: api, _picker: picker, _facts: facts, _unauthorized: unauthorized });
    this._models = [];
    this._timer = 0;
    this.changed = () => {}; // called when another endpoint is chosen
    picker.addEventListener("change", () => this._describe());
  }

  /** The chosen endpoint's card from GET /v1/models. */
  get chosen() {
    return this._models.find(({ id }) => id === this._picker.value);
  }

  /** Whether the chosen endpoint blends several models token by token. */
  get blends() {
    return (this.chosen?.members?.length ?? 0) > 1 && !this.chosen.strategy;
  }

  /** Whether anything drafts for the chosen endpoint. */
  get proposes() {
    return this.chosen?.proposers?.length !== 0;
  }

  /** Loads the endpoints, repeatedly until all are ready. */
  async load() {
    clearTimeout(this._timer);
    try {
      this._show(await this._api.models());
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this._facts.replaceChildren(problem(error));
      if (error.status === 401) return this._unauthorized();
      this._scheduleLoad();
    }
  }

  _show(models) {
    const chosen = this._picker.value;
    this._models = models;
    this._picker.replaceChildren(...models.map(({ id }) => new Option(id, id, false, id === chosen)));
    this._describe();
    if (!models.every(({ ready = true }) => ready)) this._scheduleLoad();
  }

  _describe() {
    this._facts.textContent = this.chosen ? described(this.chosen) : "There is no endpoint.";
    if (this.chosen?.id === this._described) return;
    this._described = this.chosen?.id;
    this.changed();
  }

  _scheduleLoad() {
    this._timer = setTimeout(() => this.load(), RETRY_MS);
  }
}

function described({ target, members, strategy, drafter, ngram, proposers = [], draft_length: length, context_length: context, ready = true }) {
  const parts = [
    !ready && "still loading",
    members?.length > 1 ? `members ${members.join(", ")}` : target && `target ${target}`,
    strategy && `strategy ${strategy}`,
    drafter && `drafter ${drafter}`,
    ngram && "n-gram drafts",
    proposers.includes("medusa") && "Medusa heads",
    proposers.includes("eagle3") && "EAGLE-3 head",
    length && `γ ${length}`,
    context && `context ${number(context)}`,
  ];
  return parts.filter(Boolean).join(" · ");
}
