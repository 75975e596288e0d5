/** A tooltip for the token under the pointer or with the keyboard's focus. */

import { make } from "../common/dom.js";
import { tokenOf } from "./tokens.js";
import { markOf } from "./members.js";
import { classOf, meaningOf } from "./sources.js";
import { percent, visible } from "../common/format.js";

const GAP_PX = 8;

export class Tip {
  /** @param {HTMLElement} element  @param {(words: string) => void} announce */
  constructor(element, announce) {
    this._element = element;
    this._announce = announce;
    this._target = null;
  }

  /** Shows tips for all tokens in an element. */
  watch(root) {
    root.addEventListener("pointerover", ({ target }) => this._show(target));
    root.addEventListener("pointerleave", () => this.hide());
    root.addEventListener("scroll", () => this._follow(root), { passive: true });
    root.addEventListener("focusin", ({ target }) => this._show(target) && this._announce(wordsOf(tokenOf(target))));
    root.addEventListener("focusout", () => this.hide());
    root.addEventListener("keydown", (event) => this._move(event));
  }

  hide() {
    this._element.hidden = true;
    this._target = null;
  }

  _show(target) {
    const token = tokenOf(target);
    if (!token) {
      this.hide();
      return false;
    }
    this._element.replaceChildren(...contentOf(token));
    this._element.hidden = false;
    this._target = target;
    this._setPosition();
    return true;
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
    const next = nextOf(event.key, group, tokenOf(event.target) ? event.target : null);
    if (!next) return;
    event.preventDefault();
    event.stopPropagation();
    next.focus();
  }
}

function nextOf(key, group, current) {
  const tokens = [...group.querySelectorAll(".token")];
  const index = tokens.indexOf(current);
  switch (key) {
    case "ArrowRight":
      return tokens[index + 1];
    case "ArrowLeft":
      return tokens.at(current ? index - 1 : -1);
    case "Home":
      return tokens[0];
    case "End":
      return tokens.at(-1);
    case "Escape":
      return current && group;
    default:
      return null;
  }
}

function contentOf(token) {
  const head = make("p", { className: "tip-token" }, make("code", { textContent: visible(token.text) }));
  if (token.id !== null) head.append(make("span", { className: "facts", textContent: ` id ${token.id}` }));
  const source = make("p", { className: `tip-source ${classOf(token.source, token.proposer)}` });
  source.append(make("b", { textContent: token.source || "token" }), `: ${meaningOf(token.source, token.proposer)}`);
  return [head, source, ...members(token), ...probabilities(token)];
}

/** Each member's share and probability of the token. */
function members(token) {
  if (!token.members.length) return [];
  const rows = token.members.map(({ model, logprob, agreed, share }) => {
    const name = make("b", { className: "by-member", textContent: model });
    name.dataset.member = markOf(model);
    const text = `${percent(share)}, p ${probability(Math.exp(logprob))}${agreed ? " ✓" : ""}`;
    return row(name, share, text);
  });
  return [make("p", { textContent: "Share of each member, probability to it alone, ✓ its first choice:" }), make("ol", {}, ...rows)];
}

function row(name, share, text, className = "") {
  const bar = make("meter", { min: 0, max: 1, value: share, "aria-hidden": "true" });
  return make("li", { className }, name, bar, make("span", { textContent: text }));
}

function probabilities(token) {
  if (token.logprob === null) return [];
  const own = Math.exp(token.logprob);
  const words = `The model gave it ${probability(own)}${token.top.length ? ", and at its position:" : "."}`;
  const rows = token.top.map(({ text, logprob }) => {
    const share = Math.exp(logprob);
    return row(make("code", { textContent: visible(text) }), share, probability(share), logprob === token.logprob ? "chosen" : "");
  });
  return [make("p", { textContent: words }), make("ol", {}, ...rows)];
}

function probability(share) {
  return share > 0 && share < 0.005 ? "< 1 %" : percent(share);
}

function wordsOf(token) {
  const others = token.top.map(({ text, logprob }) => `${visible(text)} ${probability(Math.exp(logprob))}`);
  const own = token.logprob === null ? "" : `, ${probability(Math.exp(token.logprob))}`;
  const shares = token.members.map(({ model, share }) => `${model} ${percent(share)}`);
  const members = shares.length ? `; ${shares.join(", ")}` : "";
  return `${visible(token.text)}: ${token.source}${own}${members}${others.length ? `; at its position: ${others.join(", ")}` : ""}`;
}
