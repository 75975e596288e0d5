/** The owners of tokens in an ensemble's answer. */

const COLOURS = 6;
export const AGREED = "agreed";
const names = []; // all members so far; the index sets the colour

/**
 * @param {import("./answer.js").Token} token
 * @returns {string} "agreed" if it was every member's most probable token; else the member with the largest share;
 *   "" if unknown
 */
export function ownerOf({ members }) {
  if (members.length > 1 && members.every(({ agreed }) => agreed)) return AGREED;
  const first = (best, other) => (other.share > best.share ? other : best);
  return members.length ? members.reduce(first).model : "";
}

/** The mark of an owner's tokens, for the style sheet. */
export function markOf(owner) {
  if (owner === AGREED || owner === "") return owner;
  if (!names.includes(owner)) names.push(owner);
  return String(names.indexOf(owner) % COLOURS);
}

export function meaningOfOwner(owner) {
  if (owner === AGREED) return "every member's most probable token";
  return owner ? `the members disagreed, and ${owner} had the largest share` : "the server did not name the members";
}

/** The largest share, 0 to 1. */
export function shareOf({ members }) {
  return Math.max(0, ...members.map(({ share }) => share));
}
