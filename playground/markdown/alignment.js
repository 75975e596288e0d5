/** Tells which token each character of rendered Markdown comes from. Pure. */

const WORDS = /[\p{L}\p{N}]+|\s+|./gsu;
const BLANK = /^\s/;
const REACH = 2000; // characters of markup between two words, such as a link's address

/**
 * Finds the pieces of a rendered text in the source, in order. Markup is passed over.
 *
 * @param {string} text a piece of rendered text
 * @param {string} source
 * @param {number} begin index in the source from which to look
 * @returns {{parts: {text: string, start: number}[], end: number}} start: index in the source; -1: not there
 */
export function align(text, source, begin) {
  const parts = [];
  let end = begin;
  for (const [word] of text.matchAll(WORDS)) {
    const start = startOf(word, source, end);
    parts.push({ text: word, start });
    if (start < 0) continue;
    end = BLANK.test(word) ? start + 1 : start + word.length;
    if (BLANK.test(word)) while (BLANK.test(source[end] ?? "")) end++;
  }
  return { parts, end };
}

/** Where a word is in the source, at or soon after an index; -1: it is not. Blanks are there or not at all. */
function startOf(word, source, index) {
  if (BLANK.test(word)) return BLANK.test(source[index] ?? "") ? index : -1;
  const start = source.indexOf(word, index);
  return start - index < REACH ? start : -1;
}

/** The index of the last of some ascending starts that is not above an index. */
export function indexOfLast(starts, index) {
  let [low, high] = [0, starts.length - 1];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (starts[middle] <= index) low = middle;
    else high = middle - 1;
  }
  return low;
}
