/** Shows an answer's tokens, one element per token. Fast tokens are drawn in batches. */

import { make } from "../common/dom.js";
import { markOf, ownerOf, shareOf } from "./members.js";
import { classOf } from "./sources.js";

const BETWEEN_MS = 40; // between drawings, which take time from models on the same machine
const tokens = new WeakMap();

/** @returns {import("./answer.js").Token | undefined} the token that an element shows */
export function tokenOf(element) {
  return tokens.get(element);
}

export class TokenView {
  /** @param {HTMLElement} element  @param {() => void} drawn called after each drawing */
  constructor(element, drawn) {
    this.element = element;
    this._drawn = drawn;
    this._waiting = [];
    this._timer = 0;
    this._spans = [];
  }

  add(added) {
    this._waiting.push(...added);
    this._timer ||= setTimeout(() => this.flush(), BETWEEN_MS);
  }

  flush() {
    clearTimeout(this._timer);
    this._timer = 0;
    const spans = this._waiting.map(spanOf);
    this._waiting = [];
    this._spans.push(...spans);
    this.element.append(...spans);
    this._drawn();
  }

  /** Redraws tokens whose text was cut when the answer ended. */
  settle() {
    this.flush();
    for (const span of this._spans) {
      const { text } = tokens.get(span);
      if (span.textContent !== text) span.textContent = text;
    }
  }

  /** Marks everything from a character on. */
  markFrom(index) {
    let end = 0;
    for (const span of this._spans) {
      end += span.textContent.length;
      if (end > index) span.classList.add("differs");
    }
  }
}

function spanOf(token) {
  const span = make("span", { className: `token ${classOf(token.source, token.proposer)}`, textContent: token.text, tabIndex: -1 });
  if (token.members.length) {
    span.dataset.member = markOf(ownerOf(token));
    span.style.setProperty("--share", String(shareOf(token)));
  }
  tokens.set(span, token);
  return span;
}
