/** How tokens come to be, in words and as classes of the style sheet. */

const KNOWN = {
  accepted: "a draft token that the target chose, too",
  recovered: "the target's own, where it chose otherwise than drafted",
  bonus: "the target's own, after a draft that it accepted to the end",
  plain: "the target's own, in a step without a draft",
};
const MEMBER_CLASSES = 6;
const members = []; // names that are none of the above: an ensemble's members, in order of appearance

/** Where a source stands in a list of them. */
export function rankOf(source) {
  const names = Object.keys(KNOWN);
  return source in KNOWN ? names.indexOf(source) : names.length + members.indexOf(source);
}

/** The class of a source's tokens. */
export function classOf(source) {
  if (source === "" || source in KNOWN) return source || "unknown";
  if (!members.includes(source)) members.push(source);
  return `member-${members.indexOf(source) % MEMBER_CLASSES}`;
}

export function meaningOf(source) {
  return KNOWN[source] ?? (source ? `decided by ${source}` : "the server did not say how it came to be");
}
