/** Splits Markdown into blocks, and renders each. Must not know tokens. */

import { Marked } from "../vendor/marked.esm.js";
import { addCode } from "./code.js";
import { clean } from "./sanitiser.js";

const TOP_HEADING = 4; // an answer's first level; those above are the page's
const LAST_HEADING = 6;

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text), // shown, not obeyed
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    heading({ tokens, depth }) {
      const level = Math.min(depth + TOP_HEADING - 1, LAST_HEADING);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>\n`;
    },
  },
});

/**
 * @typedef {object} Block
 * @property {string} raw its part of the text; all together are the text
 * @property {object} parsed the parser's own
 */

/** @returns {Block[]} */
export function blocksOf(text) {
  return marked.lexer(text).map((parsed) => ({ raw: parsed.raw, parsed }));
}

/** Renders a block. @param {Block} block  @returns {DocumentFragment} */
export function rendered({ parsed }) {
  const fragment = clean(marked.parser([parsed]));
  for (const block of fragment.querySelectorAll("pre")) addCode(block);
  return fragment;
}

function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");
}
