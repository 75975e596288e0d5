/** Two charts of an answer's steps: acceptance by position in the draft, and the tokens of the last steps. */

import { classOf } from "../answers/tokens.js";
import { draw, facts } from "../dom.js";
import { percent, plural } from "../format.js";
import { byPosition } from "./speculation.js";

const WIDTH = 280;
const HEIGHT = 132; // of the chart by position
const BASE = HEIGHT - 18; // the foot of the bars; positions are below
const TOP = 16; // shares are above
const MOST_LABELLED = 9; // more bars show their shares on hover only
const COLUMN = 7; // width of a step, with a gap of 1
const MOST_TOKENS = 33; // of a step: the longest draft and the target's own token

/** Shows how often drafts were accepted up to each position. */
export function showPositions(element, steps) {
  const positions = byPosition(steps);
  if (!positions.length) return element.replaceChildren(facts("No drafts yet.", "p"));
  const bars = positions.map((position) => bar(position, WIDTH / positions.length, positions.length <= MOST_LABELLED));
  const line = draw("line", { x1: 0, x2: WIDTH, y1: BASE, y2: BASE, class: "base" });
  const shares = positions.map(({ position, accepted, drafts }) => `position ${position}: ${percent(accepted / drafts)}`);
  const note = `Share of ${positions[0].drafts} drafts that were accepted up to each position.`;
  show(element, HEIGHT, [...bars, line], `Drafts accepted up to ${shares.join(", ")}.`, note);
}

/** Shows a column for each of the last steps, with a square for each token. */
export function showSteps(element, steps) {
  if (!steps.length) return element.replaceChildren(facts("No steps yet.", "p"));
  const last = steps.slice(-WIDTH / COLUMN).map((step) => step.slice(0, MOST_TOKENS));
  const height = COLUMN * Math.max(...last.map((step) => step.length), 5);
  const size = { width: COLUMN - 1, height: COLUMN - 1, rx: 1.5 };
  const squares = last.flatMap((step, index) =>
    step.map((token, level) =>
      draw("rect", { x: index * COLUMN, y: height - (level + 1) * COLUMN, ...size, class: `square ${classOf(token)}` }),
    ),
  );
  const words = `Tokens of the target's last ${plural(last.length, "step")}: ${last.map((step) => step.length).join(", ")}.`;
  show(element, height, squares, words, "Tokens that each of the last steps of the target brought, oldest step first.");
}

function show(element, height, shapes, words, note) {
  const chart = { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": words };
  element.replaceChildren(draw("svg", chart, ...shapes), facts(note, "p"));
}

function bar({ position, accepted, reached, drafts }, room, labelled) {
  const share = accepted / drafts;
  const height = share * (BASE - TOP);
  const [left, width, middle] = [(position - 1) * room + room * 0.15, room * 0.7, (position - 0.5) * room];
  const text = `Position ${position}: ${accepted} of ${drafts} drafts; ${accepted} of the ${reached} that got so far.`;
  return draw(
    "g",
    {},
    draw("title", {}, text),
    draw("rect", { x: left, y: TOP, width, height: BASE - TOP, rx: 3, class: "room" }),
    draw("rect", { x: left, y: BASE - height, width, height, rx: 3, class: "bar" }),
    labelled ? draw("text", { x: middle, y: BASE - height - 4, class: "share" }, percent(share)) : "",
    draw("text", { x: middle, y: HEIGHT - 4 }, String(position)),
  );
}
