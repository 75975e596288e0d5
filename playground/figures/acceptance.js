/** Acceptance of draft tokens by position in the draft. Pure. */

/**
 * @typedef {object} Position
 * @property {number} position 1 is the first draft token
 * @property {number} accepted steps that accepted the draft up to here
 * @property {number} reached steps that accepted everything before, so that this token was verified
 * @property {number} drafts steps that had a draft
 */

/**
 * Counts from the tokens: a step accepted as many draft tokens as it starts with. A `recovered` token replaced one more
 * that was verified.
 *
 * @param {import("../answers/answer.js").Token[][]} steps
 * @returns {Position[]}
 */
export function byPosition(steps) {
  const drafts = steps.filter((step) => ["accepted", "recovered"].includes(step[0].source));
  const accepted = drafts.map((step) => step.filter(({ source }) => source === "accepted").length);
  const judged = drafts.map((step, index) => accepted[index] + (step.at(-1).source === "recovered" ? 1 : 0));
  return Array.from({ length: Math.max(0, ...judged) }, (_, index) => ({
    position: index + 1,
    accepted: accepted.filter((count) => count > index).length,
    reached: judged.filter((count) => count > index).length,
    drafts: drafts.length,
  }));
}
