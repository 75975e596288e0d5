/** The figures of an answer: a list in the panel, a line below the answer, and what the colours mean. */

import { make } from "./dom.js";
import { classOf, meaningOf, rankOf } from "./sources.js";
import { duration, number, orDash, percent, plural } from "./words.js";

const HELP = {
  "Tokens/s": "Of the whole time, from sending on.",
  "First token": "Time from sending to the first token.",
  "Acceptance rate": "Draft tokens that the target accepted, of those that it verified. Known at the end.",
  "Acceptance length": "Tokens per step of the target.",
  Steps: "Steps of the target.",
};

/** @param {HTMLElement} list  @param {import("./answer.js").Answer | null} answer */
export function showStatistics(list, answer) {
  const figures = {
    "Tokens/s": orDash(answer?.tokensPerS, 1),
    "First token": duration(answer?.firstMs),
    "Acceptance rate": percent(answer?.acceptanceRate),
    "Acceptance length": orDash(answer?.acceptanceLength, 2),
    Steps: orDash(answer?.speculation?.steps ?? (answer?.steps.length || NaN)),
    Tokens: orDash(answer?.count || NaN),
  };
  const pairs = Object.entries(figures).map(([name, value]) =>
    make("div", { title: HELP[name] ?? "" }, make("dt", { textContent: name }), make("dd", { textContent: value })),
  );
  list.replaceChildren(...pairs);
}

/** What each colour in an answer means, and how many tokens have it. */
export function showLegend(list, answer) {
  const counts = [...(answer?.sources ?? [])].sort(([one], [other]) => rankOf(one) - rankOf(other));
  const items = counts.map(([source, count]) =>
    make(
      "li",
      { title: meaningOf(source) },
      make("span", { className: `swatch token ${classOf(source)}`, textContent: source || "token" }),
      make("span", { className: "facts", textContent: ` ${number(count)}` }),
    ),
  );
  list.replaceChildren(...items);
}

/** What each of several models contributed; @returns whether there is anything to show. */
export function showMembers(table, answer) {
  const members = answer?.ensemble?.members ?? [];
  const row = (kind, ...cells) => make("tr", {}, ...cells.map((text) => make(kind, { textContent: text })));
  const rows = members.map(({ model, weight, agreement, answered }) =>
    row("td", answered ? model : `${model} (gone)`, percent(weight), percent(agreement ?? NaN)),
  );
  table.replaceChildren(row("th", "Model", "Weight", "Agreed"), ...rows);
  return members.length > 0;
}

/** How fast an answer was and why it ended, in one line. */
export function summary(answer) {
  const { finish, speculation, seed } = answer;
  const parts = [
    answer.stopped && "stopped",
    answer.cached && "from the server's cache",
    answer.count && plural(answer.count, "token"),
    answer.count && `${orDash(answer.tokensPerS, 1)} tokens/s`,
    answer.count && `first after ${duration(answer.firstMs)}`,
    speculation?.drafted && `${percent(answer.acceptanceRate)} accepted`,
    answer.steps.length && `${orDash(answer.acceptanceLength, 2)} per step`,
    finish && finish !== "stop" && `ended by ${finish}`,
    seed !== null && `seed ${seed}`,
  ];
  return parts.filter(Boolean).join(" · ");
}
