/** An answer's text: its reasoning, folded, and its content, as written or as Markdown in which words keep their tokens. */

import { make } from "../dom.js";
import { plural } from "../format.js";
import { blocksOf, rendered } from "./markdown.js";
import { spanOf, tokenOf } from "./tokens.js";

const BETWEEN_MS = 60; // between drawings, which take time from models on the same machine
const SHARE = 8; // a drawing takes at most one part in so many of the time
const KEY_LENGTH = 32; // characters of the text's start by which it is looked for among the tokens'
const WORDS = /[\p{L}\p{N}]+|\s+|./gsu;
const BLANK = /^\s/;
const REACH = 2000; // characters of markup between two words, such as a link's address

export class AnswerText {
  /** look: see Card. drawn: called after each drawing. */
  constructor(answer, { prompt, monospace, formatted }, drawn) {
    Object.assign(this, { _answer: answer, _formatted: formatted, _drawn: drawn, _timer: 0, _lastMs: 0 });
    this._body = tokensElement("Tokens of the answer; arrow keys describe each");
    this._thoughts = tokensElement("Tokens of the reasoning; arrow keys describe each");
    this._summary = make("summary");
    this._folded = make("details", { className: "reasoning", hidden: true }, this._summary, this._thoughts);
    const given = prompt ? [make("span", { className: "prompt", textContent: prompt })] : [];
    const text = make("div", { className: `card-text${monospace ? " monospace" : ""}` }, ...given, this._body);
    this.element = make("div", { className: "answer-text" }, this._folded, text);
    this._begin();
  }

  /** Draws soon. */
  update() {
    this._timer ||= setTimeout(() => this._draw("draw"), Math.max(BETWEEN_MS, SHARE * this._lastMs));
  }

  /** Draws the complete answer. */
  settle() {
    this._draw("settle");
  }

  /** Shows the content formatted, or as written. */
  show(formatted) {
    if (formatted === this._formatted) return;
    this._formatted = formatted;
    this.redraw();
  }

  /** Draws everything anew. */
  redraw() {
    this._begin();
    this.settle();
  }

  _begin() {
    this.element.classList.toggle("formatted", this._formatted);
    this._reasoning = new WrittenView(this._thoughts);
    this._content = this._formatted ? new FormattedView(this._body) : new WrittenView(this._body);
  }

  _draw(how) {
    clearTimeout(this._timer);
    this._timer = 0;
    const beganMs = performance.now();
    const { tokens, text, reasoning } = this._answer;
    const thoughts = tokens.filter(({ thought }) => thought);
    this._folded.hidden = reasoning === "";
    if (reasoning) this._reasoning[how](thoughts);
    this._summary.textContent = text || how === "settle" ? `Reasoning, ${plural(thoughts.length, "token")}` : "Thinking…";
    const content = tokens.filter(({ thought }) => !thought);
    this._content[how](content, text);
    this._lastMs = performance.now() - beganMs;
    this._drawn();
  }
}

/** An element for tokens, which the keyboard and screen readers find. */
export function tokensElement(label) {
  return make("div", { className: "tokens", role: "group", tabIndex: 0, "aria-label": label });
}

/** Tokens as the model wrote them. New ones are added, nothing is drawn anew. */
export class WrittenView {
  constructor(element) {
    Object.assign(this, { _element: element, _spans: [] });
    element.replaceChildren();
  }

  draw(tokens) {
    const added = tokens.slice(this._spans.length).map((token) => spanOf(token));
    this._spans.push(...added);
    this._element.append(...added);
  }

  /** Draws tokens whose text was cut when the answer ended. */
  settle(tokens) {
    this.draw(tokens);
    for (const span of this._spans) {
      const { text } = tokenOf(span);
      if (span.textContent !== text) span.textContent = text;
    }
  }
}

/** Markdown in which each word keeps its token. Only blocks that changed are drawn anew. */
class FormattedView {
  constructor(element) {
    Object.assign(this, { _element: element, _blocks: [] }); // raw: of the source; nodes
    element.replaceChildren();
  }

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

/** Replaces the texts in a fragment by spans of tokens. begin: where the fragment's text begins in the source. */
function colour(fragment, source, begin) {
  if (!source.tokens.length) return;
  const walker = document.createTreeWalker(fragment, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  let index = begin;
  for (const node of texts) {
    if (node.data.trim() === "" || node.parentElement?.closest("figcaption")) continue; // not the answer's
    const { parts, end } = align(node.data, source.text, index);
    index = end;
    node.replaceWith(...runs(parts, source).map(({ token, text }) => (token ? spanOf(token, text) : text)));
  }
}

/** Finds the words of a rendered text in the source, in order, from an index on. start: -1 if a word is not there. */
function align(text, source, begin) {
  const parts = [];
  let end = begin;
  for (const [word] of text.matchAll(WORDS)) {
    const start = startOf(word, source, end);
    parts.push({ text: word, start });
    if (start < 0) continue;
    end = BLANK.test(word) ? start + 1 : start + word.length;
    if (BLANK.test(word)) while (BLANK.test(source[end] ?? "")) end++;
  }
  return { parts, end };
}

/** Where a word is in the source, at or soon after an index; -1: it is not. Blanks are there or not at all. */
function startOf(word, source, index) {
  if (BLANK.test(word)) return BLANK.test(source[index] ?? "") ? index : -1;
  const start = source.indexOf(word, index);
  return start - index < REACH ? start : -1;
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
    if (start < 0) {
      add(null, text);
      continue;
    }
    let index = starts.findLastIndex((begin) => begin <= start);
    for (let done = 0; done < text.length; index++) {
      const end = index + 1 < starts.length ? starts[index + 1] - start : text.length;
      if (end > done) add(tokens[index], text.slice(done, end));
      done = Math.max(done, end);
    }
  }
  return joined;
}
