/** The sources of tokens: descriptions and style classes. */

const KNOWN = {
  accepted: "a draft token that the target chose, too",
  recovered: "the target's own, where it chose otherwise than drafted",
  bonus: "the target's own, after a draft that it accepted to the end",
  plain: "the target's own, in a step without a draft",
};
export const SOURCES = Object.keys(KNOWN);

/** The class of a source's tokens. */
export function classOf(source) {
  return source in KNOWN ? source : "unknown";
}

export function meaningOf(source) {
  return KNOWN[source] ?? "the server did not name its source";
}
