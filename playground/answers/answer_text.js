/** An answer's text: its reasoning, folded, and its content, formatted or as written. Fast tokens are drawn in batches. */

import { make } from "../common/dom.js";
import { plural } from "../common/format.js";
import { FormattedView } from "./formatted_view.js";
import { WrittenView } from "./written_view.js";

const BETWEEN_MS = 60; // between drawings, which take time from models on the same machine
const SHARE = 8; // a drawing takes at most one part in so many of the time

export class AnswerText {
  /**
   * @param {import("./answer.js").Answer} answer
   * @param {{prompt: string, monospace: boolean, formatted: boolean, drawn: () => void}} options drawn: called after
   *   each drawing
   */
  constructor(answer, { prompt, monospace, formatted, drawn }) {
    Object.assign(this, { _answer: answer, _formatted: formatted, _drawn: drawn, _timer: 0, _lastMs: 0 });
    this._body = make("div", keys("Tokens of the answer; arrow keys describe each"));
    this._thoughts = make("div", keys("Tokens of the reasoning; arrow keys describe each"));
    this._summary = make("summary");
    const given = prompt ? [make("span", { className: "prompt", textContent: prompt })] : [];
    const folded = make("details", { className: "reasoning", hidden: true }, this._summary, this._thoughts);
    this._text = make("div", { className: `card-text${monospace ? " monospace" : ""}` }, ...given, this._body);
    this._folded = folded;
    this.element = make("div", { className: "answer-text" }, folded, this._text);
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
    this._draw("settle");
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
    const { thoughts, content, text, reasoning } = this._answer;
    this._folded.hidden = reasoning === "";
    if (reasoning) this._reasoning[how](thoughts);
    this._summary.textContent = text || how === "settle" ? `Reasoning, ${plural(thoughts.length, "token")}` : "Thinking…";
    this._content[how](content, text);
    this._lastMs = performance.now() - beganMs;
    this._drawn();
  }
}

function keys(label) {
  return { className: "tokens", role: "group", tabIndex: 0, "aria-label": label };
}
