/** The tokens of the target's last steps: a column per step, a square per token. */

import { draw, make } from "../common/dom.js";
import { classOf } from "../answers/sources.js";
import { plural } from "../common/format.js";

const WIDTH = 280;
const COLUMN = 7; // width in pixels, with a gap of 1
const LAST = WIDTH / COLUMN;
const MOST_TOKENS = 33; // of a step: the longest draft and the target's own token

/** Shows the last steps of an answer in an element. */
export function showSteps(element, steps) {
  if (!steps.length) {
    element.replaceChildren(make("p", { className: "facts", textContent: "No steps yet." }));
    return;
  }
  const last = steps.slice(-LAST).map((step) => step.slice(0, MOST_TOKENS));
  const height = COLUMN * Math.max(...last.map((step) => step.length), 5);
  const squares = last.flatMap((step, index) => step.map((token, level) => square(token, index, height, level)));
  const words = `Tokens of the target's last ${plural(last.length, "step")}: ${last.map((step) => step.length).join(", ")}.`;
  const chart = { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": words };
  const note = "Tokens that each of the last steps of the target brought, oldest step first.";
  element.replaceChildren(draw("svg", chart, ...squares), make("p", { className: "facts", textContent: note }));
}

function square({ source, proposer }, index, height, level) {
  const [x, y] = [index * COLUMN, height - (level + 1) * COLUMN];
  return draw("rect", { x, y, width: COLUMN - 1, height: COLUMN - 1, rx: 1.5, class: `square ${classOf(source, proposer)}` });
}
