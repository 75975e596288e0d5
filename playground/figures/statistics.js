/** The figures of an answer: in the panel, and in a line below the answer. */

import { AGREED, classOf, markMember, meaningOf, meaningOfOwner, nameOf, ownerOf, SOURCES } from "../answers/tokens.js";
import { byId, facts, make } from "../dom.js";
import { duration, number, orDash, percent, plural } from "../format.js";
import { showPositions, showSteps } from "./charts.js";
import { restsOf } from "./speculation.js";

const BETWEEN_MS = 150; // between drawings of an answer in progress, which take time from models
const ENDS = ["stop", "tool_calls"]; // finish reasons that need no mention

/** The panel's figures of one answer. */
export class Figures {
  constructor() {
    this._byMember = false;
    this.show(null);
  }

  show(answer) {
    this._answer = answer;
    this._shownMs = performance.now();
    showStatistics(byId("statistics"), answer);
    showLegend(byId("legend"), answer?.tokens ?? [], this._byMember);
    showProposers(byId("proposers"), Object.entries(answer?.speculation?.proposers ?? {}));
    showMembers(byId("members"), answer?.ensemble ?? {});
    byId("members-section").hidden = byId("members").hidden;
    showPositions(byId("chart"), answer?.steps ?? []);
    showSteps(byId("steps"), answer?.steps ?? []);
  }

  /** Shows an answer in progress, if it is time. */
  follow(answer) {
    if (performance.now() - this._shownMs > BETWEEN_MS) this.show(answer);
  }

  /** Explains the colours by member or by source. */
  colour(byMember) {
    this._byMember = byMember;
    this.show(this._answer);
  }
}

function showStatistics(list, answer) {
  const steps = (answer?.alone && answer.speculation?.steps) || answer?.steps.length;
  const figures = [
    ["Tokens/s", orDash(answer?.tokensPerS, 1), "Over the time since sending."],
    ["First token", duration(answer?.firstMs), "Time from sending to the first token."],
    ["Acceptance rate", percent(answer?.acceptanceRate), "Draft tokens that the target accepted, of those that it verified. Known at the end."],
    ["Acceptance length", orDash(answer?.acceptanceLength, 2), "Tokens per step of the target."],
    ["Steps", orDash(steps || NaN), "Steps of the target."],
    ["Tokens", orDash(answer?.count || NaN), ""],
  ];
  const pairs = figures.map(([name, value, title]) =>
    make("div", { title }, make("dt", { textContent: name }), make("dd", { textContent: value })),
  );
  list.replaceChildren(...pairs);
}

/** Shows what each colour means, and of how many tokens. */
function showLegend(list, tokens, byMember) {
  const order = byMember ? [AGREED, ...(tokens[0]?.members ?? []).map(({ model }) => model)] : SOURCES;
  const rank = ([name]) => order.indexOf(byMember ? name : name.split(" ")[0]);
  const kinds = [...Map.groupBy(tokens, byMember ? ownerOf : kindOf)].sort((left, right) => rank(left) - rank(right));
  const items = kinds.map(([name, group]) => {
    const style = byMember ? "by-member" : classOf(group[0]);
    const swatch = make("span", { className: `swatch token ${style}`, textContent: name || "token" });
    if (byMember) markMember(swatch, name);
    const title = byMember ? meaningOfOwner(name) : meaningOf(group[0]);
    return make("li", { title }, swatch, facts(` ${number(group.length)}`));
  });
  list.replaceChildren(...items);
}

/** A token's source; for accepted ones, also who drafted them, where the answer tells. */
function kindOf({ source, proposer }) {
  return source === "accepted" && proposer ? `${source} · ${nameOf(proposer)}` : source;
}

/** Shows who drafted how much. */
function showProposers(table, proposers) {
  const rows = proposers.map(([name, { drafted, accepted }]) => [
    nameOf(name),
    number(drafted),
    `${number(accepted)}, ${percent(accepted / drafted)}`,
  ]);
  fill(table, ["Drafts by", "Drafted", "Accepted"], rows);
}

/** Shows what each member contributed. */
function showMembers(table, { members = [], winner, writer }) {
  const rows = members.map(({ model, weight, agreement, answered }) => {
    const notes = [!answered && "gone", model === winner && "chosen", model === writer?.model && "writer"].filter(Boolean).join(", ");
    return [notes ? `${model} (${notes})` : model, percent(weight), percent(agreement ?? NaN)];
  });
  fill(table, ["Model", "Weight", "Agreed"], rows);
}

/** Fills a table, and hides it if it has no rows. */
function fill(table, headings, rows) {
  const row = (tag, cells) => make("tr", {}, ...cells.map((textContent) => make(tag, { textContent })));
  table.replaceChildren(row("th", headings), ...rows.map((cells) => row("td", cells)));
  table.hidden = rows.length === 0;
}

/** What is to be said of an answer below it, in one line. */
export function summary(answer) {
  const { alone, count, finish } = answer;
  const [speculation, seed] = alone ? [answer.speculation, answer.seed] : [null, null];
  return joined(
    answer.edited && "written by you",
    answer.stopped && "stopped",
    answer.cached && "from the server's cache",
    count && plural(count, "token"),
    count && `first after ${duration(answer.firstMs)}`,
    speculation?.drafted && `${percent(answer.acceptanceRate)} accepted`,
    finish && restsOf(answer),
    answer.steps.length && `${orDash(answer.acceptanceLength, 2)} per step`,
    finish && !ENDS.includes(finish) && `ended by ${finish}`,
    seed !== null && `seed ${seed}`,
  );
}

/** The speed of all answers to one request, in one line. */
export function together(answers) {
  const [{ speculation, seed }] = answers;
  const tokens = answers.reduce((sum, { count }) => sum + count, 0);
  const lastMs = Math.max(...answers.map((answer) => answer.lastMs || 0));
  if (!tokens) return "";
  return joined(
    `${plural(answers.length, "answer")}: ${plural(tokens, "token")}`,
    `${orDash((tokens / lastMs) * 1000, 1)} tokens/s together`,
    speculation?.drafted && `${percent(speculation.acceptance_rate)} accepted`,
    seed !== null && `seed ${seed}`,
  );
}

function joined(...parts) {
  return parts.filter(Boolean).join(" · ");
}
