/** Compares two answers to the same request. Pure. */

import { number } from "../common/format.js";
import { restsOf } from "./rests.js";

/** The index of the first difference between two texts; -1 if there is none. */
export function difference(left, right) {
  if (left === right) return -1;
  const length = Math.min(left.length, right.length);
  for (let index = 0; index < length; index++) if (left[index] !== right[index]) return index;
  return length;
}

/**
 * @param {import("./answer.js").Answer} ours with drafts
 * @param {import("./answer.js").Answer} plain by the target alone
 * @param {boolean} coupled whether the verification guarantees the same text
 * @returns {{same: boolean, index: number, words: string}}
 */
export function compareTexts(ours, plain, coupled) {
  const index = difference(ours.written, plain.written);
  if (index === -1) return { same: true, index, words: `Same text${speedUp(ours, plain)}${rested(ours)}.` };
  const reason = coupled
    ? "rounding differs between batch shapes, which can tip a close choice"
    : "rejection sampling keeps the distribution, not the text";
  return { same: false, index, words: `The texts differ from character ${index + 1} on: ${reason}.` };
}

function speedUp(ours, plain) {
  const ratio = ours.tokensPerS / plain.tokensPerS;
  if (ours.cached || plain.cached) return "; one came from the server's cache, so their speeds say nothing";
  if (!Number.isFinite(ratio)) return "";
  if (ours.speculation?.drafted === 0) return `; no drafts ran, so the difference in speed, ${number(ratio, 2)} ×, is not theirs`;
  return ratio < 1 ? `; this time drafts cost speed, ${number(ratio, 2)} ×` : `, ${number(ratio, 2)} × as fast with drafts`;
}

/** When drafts rested, if they ran at all. */
function rested(answer) {
  const rests = answer.speculation?.drafted ? restsOf(answer) : "";
  return rests && `; ${rests}`;
}
