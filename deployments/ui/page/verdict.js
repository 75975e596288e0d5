/** What tells two answers to the same request apart. Pure. */

import { number } from "./words.js";

/** Where two texts begin to differ; -1: nowhere. */
export function difference(left, right) {
  if (left === right) return -1;
  const length = Math.min(left.length, right.length);
  for (let at = 0; at < length; at++) if (left[at] !== right[at]) return at;
  return length;
}

/**
 * @param {import("./answer.js").Answer} ours with drafts
 * @param {import("./answer.js").Answer} plain by the target alone
 * @param {boolean} coupled whether the verification promises the same text
 * @returns {{same: boolean, at: number, words: string}}
 */
export function verdict(ours, plain, coupled) {
  const at = difference(ours.written, plain.written);
  if (at === -1) return { same: true, at, words: `Same text${speedUp(ours, plain)}.` };
  const reason = coupled
    ? "rounding differs between batch shapes, which can tip a close choice"
    : "rejection sampling keeps the distribution, not the text";
  return { same: false, at, words: `The texts differ from character ${at + 1} on: ${reason}.` };
}

function speedUp(ours, plain) {
  const ratio = ours.tokensPerS / plain.tokensPerS;
  if (ours.cached || plain.cached) return "; one came from the server's cache, so their speeds say nothing";
  if (!Number.isFinite(ratio)) return "";
  return ratio < 1 ? `; this time drafts cost speed, ${number(ratio, 2)} ×` : `, ${number(ratio, 2)} × as fast with drafts`;
}
