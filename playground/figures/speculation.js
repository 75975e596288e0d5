/** What the steps of an answer tell about its drafts. Pure. */

import { number, plural } from "../format.js";

/**
 * Acceptance by position in the draft, 1 for the first token: `drafts`, steps that had one; `reached`, steps that accepted
 * everything before, so that this token was verified; `accepted`, steps that accepted it, too. A step accepted as many
 * draft tokens as it starts with; a `recovered` token replaced one more that was verified.
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

/** Which steps had no draft, in words; "" if all had one. The first step never has: there was no text to draft from. */
export function restsOf({ steps, speculates }) {
  const rests = steps.slice(1).map((step) => step.every(({ source }) => source === "plain"));
  const count = rests.filter(Boolean).length;
  if (!speculates || !count) return "";
  if (count === rests.length) return `no drafts in ${plural(steps.length, "step")}`;
  const first = rests.indexOf(true);
  const since = rests.slice(first).every(Boolean) ? `, from step ${first + 2} on` : "";
  return `no drafts in ${number(count)} of ${plural(steps.length, "step")}${since}`;
}

/** Why a replica in GET /v1/status wants no drafts now, in one sentence; "" if it does, or if nothing is known. */
export function reasonOf({ drafting, speculation_gain: gain }) {
  if (drafting !== false) return "";
  if (gain === null || gain >= 1) return "Drafts rest until the next trial.";
  return `Drafts rest: the server measured ${number(gain, 2)} × the speed of plain decoding with them.`;
}
