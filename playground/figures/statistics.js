/** An answer's statistics: a list in the panel, a line below the answer, and the legend. */

import { make } from "../common/dom.js";
import { AGREED, markOf, meaningOfOwner, ownerOf } from "../answers/members.js";
import { restsOf } from "../answers/rests.js";
import { classOf, meaningOf, nameOf, proposerOf, SOURCES } from "../answers/sources.js";
import { duration, number, orDash, percent, plural } from "../common/format.js";

const HELP = {
  "Tokens/s": "Over the time since sending.",
  "First token": "Time from sending to the first token.",
  "Acceptance rate": "Draft tokens that the target accepted, of those that it verified. Known at the end.",
  "Acceptance length": "Tokens per step of the target.",
  Steps: "Steps of the target.",
};

const ENDS = ["stop", "tool_calls"]; // finish reasons that need no mention

/** @param {HTMLElement} list  @param {import("../answers/answer.js").Answer | null} answer */
export function showStatistics(list, answer) {
  const figures = {
    "Tokens/s": orDash(answer?.tokensPerS, 1),
    "First token": duration(answer?.firstMs),
    "Acceptance rate": percent(answer?.acceptanceRate),
    "Acceptance length": orDash(answer?.acceptanceLength, 2),
    Steps: orDash((answer?.alone && answer.speculation?.steps) || answer?.steps.length || NaN),
    Tokens: orDash(answer?.count || NaN),
  };
  const pairs = Object.entries(figures).map(([name, value]) =>
    make("div", { title: HELP[name] ?? "" }, make("dt", { textContent: name }), make("dd", { textContent: value })),
  );
  list.replaceChildren(...pairs);
}

/** Shows the meaning of each colour, with its number of tokens. byMember: colours are by member, not by source. */
export function showLegend(list, answer, byMember) {
  const tokens = answer?.tokens ?? [];
  list.replaceChildren(...(byMember ? memberItems(tokens) : sourceItems(tokens)));
}

function memberItems(tokens) {
  const order = [AGREED, ...(tokens[0]?.members ?? []).map(({ model }) => model)];
  const counts = countsOf(tokens.map(ownerOf), order);
  return counts.map(([name, count]) => item(memberSwatch(name), meaningOfOwner(name), count));
}

/** One item for each source; accepted tokens by who drafted them, where the answer tells. */
function sourceItems(tokens) {
  const kinds = new Map(tokens.map((token) => [kindOf(token), token]));
  const order = [...kinds.keys()].sort((left, right) => rankOf(left) - rankOf(right));
  return countsOf(tokens.map(kindOf), order).map(([kind, count]) => {
    const { source, proposer } = kinds.get(kind);
    const swatch = make("span", { className: `swatch token ${classOf(source, proposer)}`, textContent: kind || "token" });
    return item(swatch, meaningOf(source, proposer), count);
  });
}

function kindOf(token) {
  return [token.source, proposerOf(token)].filter(Boolean).join(" · ");
}

function rankOf(kind) {
  return SOURCES.indexOf(kind.split(" ")[0]);
}

function item(swatch, title, count) {
  return make("li", { title }, swatch, make("span", { className: "facts", textContent: ` ${number(count)}` }));
}

/** Counts each name, in the given order. */
function countsOf(names, order) {
  const counts = new Map(order.map((name) => [name, 0]));
  for (const name of names) counts.set(name, (counts.get(name) ?? 0) + 1);
  return [...counts].filter(([, count]) => count > 0);
}

function memberSwatch(name) {
  const swatch = make("span", { className: "swatch token by-member", textContent: name || "token" });
  swatch.dataset.member = markOf(name);
  return swatch;
}

/** Shows who drafted how much; returns whether there is anything to show. */
export function showProposers(table, answer) {
  const proposers = Object.entries(answer?.speculation?.proposers ?? {});
  const row = (kind, ...cells) => make("tr", {}, ...cells.map((text) => make(kind, { textContent: text })));
  const rows = proposers.map(([name, { drafted, accepted }]) =>
    row("td", nameOf(name), number(drafted), `${number(accepted)}, ${percent(accepted / drafted)}`),
  );
  table.replaceChildren(row("th", "Drafts by", "Drafted", "Accepted"), ...rows);
  return rows.length > 0;
}

/** Shows each member's contribution; returns whether there are members. */
export function showMembers(table, answer) {
  const members = answer?.ensemble?.members ?? [];
  const row = (kind, ...cells) => make("tr", {}, ...cells.map((text) => make(kind, { textContent: text })));
  const winner = answer?.ensemble?.winner;
  const rows = members.map(({ model, weight, agreement, answered }) => {
    const notes = [!answered && "gone", model === winner && "chosen"].filter(Boolean);
    return row("td", notes.length ? `${model} (${notes.join(", ")})` : model, percent(weight), percent(agreement ?? NaN));
  });
  table.replaceChildren(row("th", "Model", "Weight", "Agreed"), ...rows);
  return members.length > 0;
}

/** An answer's speed and finish reason, in one line. For all answers to a request see `together`. */
export function summary(answer) {
  const { finish, alone } = answer;
  const [speculation, seed] = alone ? [answer.speculation, answer.seed] : [null, null];
  const parts = [
    answer.edited && "written by you",
    answer.stopped && "stopped",
    answer.cached && "from the server's cache",
    answer.count && plural(answer.count, "token"),
    answer.count && `${orDash(answer.tokensPerS, 1)} tokens/s`,
    answer.count && `first after ${duration(answer.firstMs)}`,
    speculation?.drafted && `${percent(answer.acceptanceRate)} accepted`,
    answer.finish && restsOf(answer),
    answer.steps.length && `${orDash(answer.acceptanceLength, 2)} per step`,
    finish && !ENDS.includes(finish) && `ended by ${finish}`,
    seed !== null && `seed ${seed}`,
  ];
  return parts.filter(Boolean).join(" · ");
}

/** The speed of all answers to one request, in one line. */
export function together(answers) {
  const [{ speculation, seed }] = answers;
  const tokens = answers.reduce((sum, { count }) => sum + count, 0);
  const lastMs = Math.max(...answers.map((answer) => answer.lastMs || 0));
  if (!tokens) return "";
  const parts = [
    `${plural(answers.length, "answer")}: ${plural(tokens, "token")}`,
    `${orDash((tokens / lastMs) * 1000, 1)} tokens/s together`,
    speculation?.drafted && `${percent(speculation.acceptance_rate)} accepted`,
    seed !== null && `seed ${seed}`,
  ];
  return parts.filter(Boolean).join(" · ");
}
