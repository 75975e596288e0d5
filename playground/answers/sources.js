/** The sources of tokens: descriptions and style classes. */

const KNOWN = {
  accepted: "a draft token that the target chose, too",
  recovered: "the target's own, where it chose otherwise than drafted",
  bonus: "the target's own, after a draft that it accepted to the end",
  plain: "the target's own, in a step without a draft",
};
export const SOURCES = Object.keys(KNOWN);

const PROPOSERS = { drafter: "the drafter", ngram: "a look-up in the text", medusa: "Medusa heads", eagle3: "an EAGLE-3 head" };
const NAMES = { drafter: "drafter", ngram: "n-gram", medusa: "Medusa", eagle3: "EAGLE-3" };

/** A proposer's name in short. */
export function nameOf(proposer) {
  return NAMES[proposer] ?? proposer;
}

/** Who drafted a token, in short; "" if nobody is known to have. */
export function proposerOf({ source, proposer }) {
  return source === "accepted" ? (NAMES[proposer] ?? "") : "";
}

/** The classes of a source's tokens. proposer: who drafted them, if known. */
export function classOf(source, proposer = null) {
  if (!(source in KNOWN)) return "unknown";
  return proposer in PROPOSERS ? `${source} by-${proposer}` : source;
}

export function meaningOf(source, proposer = null) {
  const meaning = KNOWN[source] ?? "the server did not name its source";
  return proposer in PROPOSERS ? `${meaning}, from ${PROPOSERS[proposer]}` : meaning;
}
