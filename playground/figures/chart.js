/** The chart of acceptance by position in the draft. */

import { byPosition } from "./acceptance.js";
import { draw, make } from "../common/dom.js";
import { percent } from "../common/format.js";

const WIDTH = 280;
const HEIGHT = 132;
const BASE = HEIGHT - 18; // the foot of the bars; positions are below
const TOP = 16; // shares are above
const MOST_LABELLED = 9; // more bars show their shares on hover only

/** Shows the chart of an answer's steps in an element. */
export function showChart(element, steps) {
  const positions = byPosition(steps);
  if (!positions.length) {
    element.replaceChildren(make("p", { className: "facts", textContent: "No drafts yet." }));
    return;
  }
  const bars = positions.map((position) => bar(position, WIDTH / positions.length, positions.length <= MOST_LABELLED));
  const line = draw("line", { x1: 0, x2: WIDTH, y1: BASE, y2: BASE, class: "base" });
  const chart = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": inWords(positions) };
  const note = `Share of ${positions[0].drafts} drafts that were accepted up to each position.`;
  element.replaceChildren(draw("svg", chart, ...bars, line), make("p", { className: "facts", textContent: note }));
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

function inWords(positions) {
  const shares = positions.map(({ position, accepted, drafts }) => `position ${position}: ${percent(accepted / drafts)}`);
  return `Drafts accepted up to ${shares.join(", ")}.`;
}
