/** The endpoint picker: the server's endpoints, and whether they are ready. */

import { problem } from "../answers/card.js";
import { number } from "../format.js";
import { ApiError } from "./api.js";

const RETRY_MS = 2000;

export class Endpoints {
  /** facts: describes the chosen endpoint. acts: `changed()`, another is chosen; `unauthorized()`, the server needs a key. */
  constructor(api, picker, facts, acts) {
    Object.assign(this, { _api: api, _picker: picker, _facts: facts, _acts: acts, _models: [], _timer: 0 });
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
      this._show((await this._api.get("v1/models")).data);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this._facts.replaceChildren(problem(error));
      if (error.status === 401) return this._acts.unauthorized();
      this._loadLater();
    }
  }

  _show(models) {
    const chosen = this._picker.value;
    this._models = models;
    this._picker.replaceChildren(...models.map(({ id }) => new Option(id, id, false, id === chosen)));
    this._describe();
    if (!models.every(({ ready = true }) => ready)) this._loadLater();
  }

  _describe() {
    this._facts.textContent = this.chosen ? described(this.chosen) : "There is no endpoint.";
    if (this.chosen?.id === this._described) return;
    this._described = this.chosen?.id;
    this._acts.changed();
  }

  _loadLater() {
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
    proposers.includes("mtp") && "MTP layer",
    proposers.includes("dflash") && "DFlash head",
    proposers.includes("pard") && "PARD model",
    proposers.includes("self") && "self-drafting",
    length && `γ ${length}`,
    context && `context ${number(context)}`,
  ];
  return parts.filter(Boolean).join(" · ");
}
