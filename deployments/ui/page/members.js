/** Whose doing tokens are, where several models answer as one. */

const COLOURS = 6;
export const AGREED = "agreed";
const names = []; // of all members that were seen, so that each keeps its colour

/**
 * @param {import("./answer.js").Token} token
 * @returns {string} "agreed" where it was every member's most probable token; else the member with the largest share;
 *   "": nothing is known
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
  return owner ? `the members were of different minds, and ${owner} had the largest share` : "the server did not say whose it is";
}

/** How much the largest share is, of 1. */
export function shareOf({ members }) {
  return Math.max(0, ...members.map(({ share }) => share));
}
