/** Formats numbers and texts. Pure. */

const LOCALE = "en";

export function number(value, digits = 0) {
  return value.toLocaleString(LOCALE, { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** A number, or a dash if there is none. */
export function orDash(value, digits = 0) {
  return Number.isFinite(value) ? number(value, digits) : "–";
}

export function percent(share) {
  return Number.isFinite(share) ? `${number(share * 100)} %` : "–";
}

/** A duration in ms or s. */
export function duration(ms) {
  if (!Number.isFinite(ms)) return "–";
  return ms < 1000 ? `${number(ms)} ms` : `${number(ms / 1000, 2)} s`;
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** A token's text with its blanks made visible. */
export function visible(text) {
  return text === "" ? "∅" : text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}
