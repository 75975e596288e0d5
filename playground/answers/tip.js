/** A tooltip for the token under the pointer or with the keyboard's focus. */

import { facts, make } from "../dom.js";
import { percent, visible } from "../format.js";
import { classOf, markMember, meaningOf, tokenOf } from "./tokens.js";

const GAP_PX = 8;

export class Tip {
  constructor(element, announce) {
    Object.assign(this, { _element: element, _announce: announce, _target: null });
  }

  /** Shows tips for all tokens in an element. */
  watch(root) {
    root.addEventListener("pointerover", ({ target }) => this._show(target));
    root.addEventListener("pointerleave", () => this.hide());
    root.addEventListener("scroll", () => this._follow(root), { passive: true });
    root.addEventListener("focusin", ({ target }) => {
      const token = this._show(target);
      if (token) this._announce(wordsOf(token));
    });
    root.addEventListener("focusout", () => this.hide());
    root.addEventListener("keydown", (event) => this._move(event));
  }

  hide() {
    this._element.hidden = true;
    this._target = null;
  }

  _show(target) {
    const token = tokenOf(target);
    if (!token) return this.hide();
    this._element.replaceChildren(...contentOf(token));
    this._element.hidden = false;
    this._target = target;
    this._setPosition();
    return token;
  }

  /** Moves with the token while it is visible. */
  _follow(root) {
    if (!this._target) return;
    const [token, seen] = [this._target.getBoundingClientRect(), root.getBoundingClientRect()];
    if (token.bottom < seen.top || token.top > seen.bottom) this.hide();
    else this._setPosition();
  }

  _setPosition() {
    const token = this._target.getClientRects()[0] ?? this._target.getBoundingClientRect();
    const { width, height } = this._element.getBoundingClientRect();
    const left = Math.min(Math.max(GAP_PX, token.left), document.documentElement.clientWidth - width - GAP_PX);
    const below = token.bottom + GAP_PX + height < window.innerHeight;
    this._element.style.left = `${Math.max(GAP_PX, left)}px`;
    this._element.style.top = `${below ? token.bottom + GAP_PX : Math.max(GAP_PX, token.top - GAP_PX - height)}px`;
  }

  /** Moves the focus from token to token with the arrow keys; Escape leaves them. */
  _move(event) {
    const group = event.target.closest?.(".tokens");
    if (!group) return;
    const tokens = [...group.querySelectorAll(".token")];
    const index = tokens.indexOf(event.target);
    const next = {
      ArrowRight: tokens[index + 1],
      ArrowLeft: tokens.at(index < 0 ? -1 : index - 1),
      Home: tokens[0],
      End: tokens.at(-1),
      Escape: index < 0 ? null : group,
    }[event.key];
    if (!next) return;
    event.preventDefault();
    event.stopPropagation();
    next.focus();
  }
}

function contentOf(token) {
  const head = make("p", {}, make("code", { textContent: visible(token.text) }));
  if (token.id !== null) head.append(facts(` id ${token.id}`));
  const source = make("p", { className: `tip-source ${classOf(token)}` });
  source.append(make("b", { textContent: token.source || "token" }), `: ${meaningOf(token)}`);
  return [head, source, ...members(token), ...probabilities(token)];
}

/** Each member's share and probability of the token. */
function members(token) {
  if (!token.members.length) return [];
  const rows = token.members.map(({ model, logprob, agreed, share }) => {
    const name = make("b", { className: "by-member", textContent: model });
    markMember(name, model);
    return row(name, share, `${percent(share)}, p ${probability(logprob)}${agreed ? " ✓" : ""}`);
  });
  return [make("p", { textContent: "Share of each member, probability to it alone, ✓ its first choice:" }), make("ol", {}, ...rows)];
}

function probabilities({ logprob: own, top }) {
  if (own === null) return [];
  const rows = top.map(({ text, logprob }) => {
    const name = make("code", { textContent: visible(text) });
    return row(name, Math.exp(logprob), probability(logprob), logprob === own ? "chosen" : "");
  });
  const words = `The model gave it ${probability(own)}${rows.length ? ", and at its position:" : "."}`;
  return [make("p", { textContent: words }), make("ol", {}, ...rows)];
}

function row(name, share, text, className = "") {
  const bar = make("meter", { min: 0, max: 1, value: share, "aria-hidden": "true" });
  return make("li", { className }, name, bar, make("span", { textContent: text }));
}

function probability(logprob) {
  const share = Math.exp(logprob);
  return share > 0 && share < 0.005 ? "< 1 %" : percent(share);
}

/** What screen readers tell of a token. */
function wordsOf({ text, source, logprob, members, top }) {
  const own = logprob === null ? "" : `, ${probability(logprob)}`;
  const shares = members.map(({ model, share }) => `${model} ${percent(share)}`).join(", ");
  const others = top.map((other) => `${visible(other.text)} ${probability(other.logprob)}`).join(", ");
  return `${visible(text)}: ${source}${own}${shares && `; ${shares}`}${others && `; at its position: ${others}`}`;
}
