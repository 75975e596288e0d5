/** Blocks of code: highlighted, with their language and a button that copies them. */

import { copies } from "../common/clipboard.js";
import { make } from "../common/dom.js";
import hljs from "../vendor/highlight.min.js";
import { clean } from "./sanitiser.js";

const MOST_CHARACTERS = 30_000; // that are highlighted, which takes time

/** Frames and highlights a block of code. @param {HTMLPreElement} block */
export function addCode(block) {
  const code = block.querySelector("code") ?? block;
  const [text, language] = [code.textContent, languageOf(code)];
  if (hljs.getLanguage(language) && text.length < MOST_CHARACTERS)
    code.replaceChildren(clean(hljs.highlight(text, { language, ignoreIllegals: true }).value));
  const button = copies(make("button", { type: "button", className: "quiet", textContent: "Copy" }), () => code.textContent);
  button.setAttribute("aria-label", "Copy this code");
  const frame = make("figure", { className: "code" });
  block.replaceWith(frame);
  frame.append(make("figcaption", {}, make("span", { textContent: language || "code" }), button), block);
  block.tabIndex = 0; // wide code scrolls
  block.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
}

function languageOf(code) {
  return /(?:^|\s)language-([\w+#-]+)/.exec(code.className)?.[1] ?? "";
}
