/** An answer as Markdown, in which each word keeps its token. Only blocks that changed are drawn anew. */

import { align, indexOfLast } from "../markdown/alignment.js";
import { blocksOf, rendered } from "../markdown/blocks.js";
import { spanOf } from "./tokens.js";

const KEY_LENGTH = 32; // characters of the text's start by which it is looked for among the tokens'

export class FormattedView {
  /** @param {HTMLElement} element */
  constructor(element) {
    this._element = element;
    this._blocks = []; // raw: of the source; nodes
    element.replaceChildren();
  }

  /** @param {import("./answer.js").Token[]} tokens all so far  @param {string} text what they say */
  draw(tokens, text) {
    const source = sourceOf(tokens, text);
    const blocks = blocksOf(text);
    let kept = 0;
    while (kept < this._blocks.length && this._blocks[kept].raw === blocks[kept]?.raw) kept++;
    for (const { nodes } of this._blocks.splice(kept)) nodes.forEach((node) => node.remove());
    let start = blocks.slice(0, kept).reduce((sum, { raw }) => sum + raw.length, source.shift);
    for (const block of blocks.slice(kept)) {
      const fragment = rendered(block);
      colour(fragment, source, start);
      this._blocks.push({ raw: block.raw, nodes: [...fragment.childNodes] });
      this._element.append(fragment);
      start += block.raw.length;
    }
  }

  settle(tokens, text) {
    this.draw([], ""); // a definition at the end may change links before it
    this.draw(tokens, text);
  }
}

/** The tokens' text, where each begins in it, and how much of it comes before the answer's. */
function sourceOf(tokens, answer) {
  const starts = [];
  let text = "";
  for (const token of tokens) {
    starts.push(text.length);
    text += token.text;
  }
  return { tokens, starts, text, shift: Math.max(0, text.indexOf(answer.slice(0, KEY_LENGTH))) };
}

/** Replaces the texts in a fragment by spans of tokens. */
function colour(fragment, source, begin) {
  if (!source.tokens.length) return;
  const walker = document.createTreeWalker(fragment, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) if (isAnswer(walker.currentNode)) texts.push(walker.currentNode);
  let index = begin;
  for (const node of texts) {
    const { parts, end } = align(node.data, source.text, index);
    index = end;
    node.replaceWith(...runs(parts, source).map(({ token, text }) => (token ? spanOf(token, text) : text)));
  }
}

function isAnswer(node) {
  return node.data.trim() !== "" && !node.parentElement?.closest("figcaption");
}

/** Joins neighbours of the same token. Blanks that are not in the source go with the token before them. */
function runs(parts, { tokens, starts }) {
  const joined = [];
  const add = (token, text) => {
    const last = joined.at(-1);
    if (last && (last.token === token || token === null)) last.text += text;
    else joined.push({ token, text });
  };
  for (const { text, start } of parts) {
    if (start < 0) add(null, text);
    else for (const { token, piece } of split(text, start, tokens, starts)) add(token, piece);
  }
  return joined;
}

/** Splits a text of the source where tokens begin. */
function* split(text, start, tokens, starts) {
  for (let done = 0, index = indexOfLast(starts, start); done < text.length; index++) {
    const end = index + 1 < starts.length ? starts[index + 1] - start : text.length;
    if (end > done) yield { token: tokens[index], piece: text.slice(done, end) };
    done = Math.max(done, end);
  }
}
