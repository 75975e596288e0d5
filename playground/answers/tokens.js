/** Makes the elements that show tokens. A token may have several. */

import { make } from "../common/dom.js";
import { markOf, ownerOf, shareOf } from "./members.js";
import { classOf } from "./sources.js";

const tokens = new WeakMap();

/** @returns {import("./answer.js").Token | undefined} the token that an element shows */
export function tokenOf(element) {
  return tokens.get(element);
}

/** An element that shows a token, or a part of its text. @param {import("./answer.js").Token} token */
export function spanOf(token, text = token.text) {
  const span = make("span", { className: `token ${classOf(token.source, token.proposer)}`, textContent: text, tabIndex: -1 });
  if (token.differs) span.classList.add("differs");
  if (token.members.length) {
    span.dataset.member = markOf(ownerOf(token));
    span.style.setProperty("--share", String(shareOf(token)));
  }
  tokens.set(span, token);
  return span;
}
