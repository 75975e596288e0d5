/** When and why drafts rested during an answer, in words. Pure. */

import { number, plural } from "../common/format.js";

/**
 * When steps had no draft; "" if all had one. The first step never has: nothing was there to draft from.
 * @param {import("./answer.js").Answer} answer
 */
export function restsOf({ steps, speculates }) {
  const rests = steps.slice(1).map((step) => step.every(({ source }) => source === "plain"));
  const count = rests.filter(Boolean).length;
  if (!speculates || !count) return "";
  if (count === rests.length) return `no drafts in ${plural(steps.length, "step")}`;
  const first = rests.indexOf(true);
  const since = rests.slice(first).every(Boolean) ? `, from step ${first + 2} on` : "";
  return `no drafts in ${number(count)} of ${plural(steps.length, "step")}${since}`;
}

/**
 * Why a target wants no drafts now, in one sentence; "" if it does, or if nothing is known.
 * @param {{drafting: ?boolean, speculation_gain: ?number}} replica see GET /v1/status
 */
export function reasonOf({ drafting, speculation_gain: gain }) {
  if (drafting !== false) return "";
  if (gain === null || gain >= 1) return "Drafts rest until the next trial.";
  return `Drafts rest: the server measured ${number(gain, 2)} × the speed of plain decoding with them.`;
}
