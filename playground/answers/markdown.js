/** Renders Markdown. Nothing else on the page parses markup; what is not listed here is dropped. */

import { button, copies, make } from "../dom.js";
import hljs from "../vendor/highlight.min.js";
import { Marked } from "../vendor/marked.esm.js";
import DOMPurify from "../vendor/purify.es.mjs";

const ALLOWED = {
  ALLOWED_TAGS: [
    ...["p", "br", "hr", "strong", "em", "del", "code", "pre", "blockquote", "a", "span"],
    ...["h4", "h5", "h6", "ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td"],
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const TOP_HEADING = 4; // an answer's first level; those above are the page's
const LAST_HEADING = 6;
const MOST_HIGHLIGHTED = 30_000; // characters of code, which take time

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

/** Splits a text into blocks, whose `raw` texts together are the text. */
export function blocksOf(text) {
  return marked.lexer(text);
}

/** Renders a block. @returns {DocumentFragment} */
export function rendered(block) {
  const fragment = clean(marked.parser([block]));
  for (const code of fragment.querySelectorAll("pre")) addCode(code);
  return fragment;
}

/** Turns markup into elements. @returns {DocumentFragment} */
export function clean(markup) {
  const fragment = DOMPurify.sanitize(markup, ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  return fragment;
}

/** Frames and highlights a block of code. @param {HTMLPreElement} block */
function addCode(block) {
  const code = block.querySelector("code") ?? block;
  const text = code.textContent;
  const language = /(?:^|\s)language-([\w+#-]+)/.exec(code.className)?.[1] ?? "";
  if (hljs.getLanguage(language) && text.length < MOST_HIGHLIGHTED)
    code.replaceChildren(clean(hljs.highlight(text, { language, ignoreIllegals: true }).value));
  const copy = copies(button("Copy", () => {}, { "aria-label": "Copy this code" }), () => code.textContent);
  const frame = make("figure", { className: "code box" });
  block.replaceWith(frame);
  frame.append(make("figcaption", { className: "row apart" }, make("span", { textContent: language || "code" }), copy), block);
  block.tabIndex = 0; // wide code scrolls
  block.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
}

function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");
}
