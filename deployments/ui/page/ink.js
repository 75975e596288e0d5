/** Writes an answer's tokens onto the page, each in an element of its own, several at once if they come fast. */

import { make } from "./dom.js";
import { markOf, ownerOf, shareOf } from "./members.js";
import { classOf } from "./sources.js";

const BETWEEN_MS = 40; // drawings: more would only take time that a model on the same machine could use
const tokens = new WeakMap();

/** @returns {import("./answer.js").Token | undefined} the token that an element shows */
export function tokenOf(element) {
  return tokens.get(element);
}

export class Ink {
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

  /** Once the answer is complete: tokens may have lost text. */
  settle() {
    this.flush();
    for (const span of this._spans) {
      const { text } = tokens.get(span);
      if (span.textContent !== text) span.textContent = text;
    }
  }

  /** Marks everything from a character on. */
  markFrom(at) {
    let end = 0;
    for (const span of this._spans) {
      end += span.textContent.length;
      if (end > at) span.classList.add("differs");
    }
  }
}

function spanOf(token) {
  const span = make("span", { className: `token ${classOf(token.source)}`, textContent: token.text, tabIndex: -1 });
  if (token.members.length) {
    span.dataset.member = markOf(ownerOf(token));
    span.style.setProperty("--share", String(shareOf(token)));
  }
  tokens.set(span, token);
  return span;
}
