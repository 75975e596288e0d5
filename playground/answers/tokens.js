/** Tokens on the page: who made each, as words and style classes, and the elements that show it. */

import { make } from "../dom.js";

const MEANINGS = {
  accepted: "a draft token that the target chose, too",
  recovered: "the target's own, where it chose otherwise than drafted",
  bonus: "the target's own, after a draft that it accepted to the end",
  plain: "the target's own, in a step without a draft",
};
export const SOURCES = Object.keys(MEANINGS);

const PROPOSERS = {
  drafter: { name: "drafter", meaning: "the drafter" },
  ngram: { name: "n-gram", meaning: "a look-up in the text" },
  medusa: { name: "Medusa", meaning: "Medusa heads" },
  eagle3: { name: "EAGLE-3", meaning: "an EAGLE-3 head" },
  mtp: { name: "MTP", meaning: "the model's own MTP layer" },
  dflash: { name: "DFlash", meaning: "a DFlash head" },
  pard: { name: "PARD", meaning: "a PARD model" },
  self: { name: "itself", meaning: "the target itself, by an adapter" },
  prediction: { name: "prediction", meaning: "the prediction in the request" },
  corpus: { name: "corpus", meaning: "a look-up in earlier texts" },
};

export const AGREED = "agreed";
const MEMBER_COLOURS = 6;
const memberNames = []; // all members so far; the index sets the colour

const tokens = new WeakMap(); // by the element that shows it

export function tokenOf(element) {
  return tokens.get(element);
}

/** An element that shows a token, or a part of its text. */
export function spanOf(token, text = token.text) {
  const span = make("span", { className: `token ${classOf(token)}`, textContent: text, tabIndex: -1 });
  if (token.differs) span.classList.add("differs");
  if (token.members.length) {
    markMember(span, ownerOf(token));
    span.style.setProperty("--share", String(Math.max(...token.members.map(({ share }) => share))));
  }
  tokens.set(span, token);
  return span;
}

/** The style classes of tokens with this source and, if it is known, this proposer. */
export function classOf({ source, proposer }) {
  if (!(source in MEANINGS)) return "unknown";
  return proposer in PROPOSERS ? `${source} by-${proposer}` : source;
}

export function meaningOf({ source, proposer }) {
  const meaning = MEANINGS[source] ?? "the server did not name its source";
  return proposer in PROPOSERS ? `${meaning}, from ${PROPOSERS[proposer].meaning}` : meaning;
}

/** A proposer's name in short. */
export function nameOf(proposer) {
  return PROPOSERS[proposer]?.name ?? proposer;
}

/** "agreed" if a token was every member's most probable one; else the member with the largest share; "" if unknown. */
export function ownerOf({ members }) {
  if (members.length > 1 && members.every(({ agreed }) => agreed)) return AGREED;
  const first = (best, other) => (other.share > best.share ? other : best);
  return members.length ? members.reduce(first).model : "";
}

export function meaningOfOwner(owner) {
  if (owner === AGREED) return "every member's most probable token";
  return owner ? `the members disagreed, and ${owner} had the largest share` : "the server did not name the members";
}

/** Marks an element as an owner's, for the style sheet. */
export function markMember(element, owner) {
  if (![AGREED, "", ...memberNames].includes(owner)) memberNames.push(owner);
  const index = memberNames.indexOf(owner);
  element.dataset.member = index < 0 ? owner : String(index % MEMBER_COLOURS);
}
