/** The calls in an answer: a card for each, with a field for its result. Calls nothing itself. */

import { make } from "../common/dom.js";

export class Calls {
  constructor() {
    this.element = make("div", { className: "calls", hidden: true });
    this._send = make("button", { type: "button", className: "main", textContent: "Send results", hidden: true });
    this._calls = [];
    this._cards = [];
    this.element.append(this._send);
  }

  /** @param {import("./answer.js").Call[]} calls so far */
  show(calls) {
    this.element.hidden = false;
    this._calls = calls;
    calls.forEach((call, index) => {
      if (!this._cards[index]) this._send.before((this._cards[index] = cardOf(index)).element);
      this._cards[index].name.textContent = call.name;
      this._cards[index].given.textContent = pretty(call.arguments);
    });
  }

  /** Shows the fields for results. act: called to send them. */
  offer(act) {
    for (const { field, result } of this._cards) {
      field.hidden = false;
      result.readOnly = false;
    }
    this._send.hidden = false;
    this._send.onclick = act;
  }

  /** Makes the results read-only once they are sent. */
  close() {
    this._send.hidden = true;
    for (const { field, result } of this._cards) {
      result.readOnly = true;
      field.hidden = result.value === "";
    }
  }

  /** The results as the API's messages, one per call. */
  get results() {
    return this._calls.map(({ id }, index) => ({ role: "tool", tool_call_id: id, content: this._cards[index].result.value }));
  }
}

function cardOf(index) {
  const name = make("code", { className: "call-name" });
  const given = make("pre", { className: "call-arguments", tabIndex: 0, "aria-label": `Arguments of call ${index + 1}` });
  const result = make("textarea", { rows: 2, spellcheck: false, placeholder: "What it returns…" });
  const field = make("label", { className: "call-result", hidden: true }, `Result of call ${index + 1}`, result);
  const title = make("p", { className: "call-title" }, make("span", { className: "facts", textContent: "calls " }), name);
  return { name, given, result, field, element: make("section", { className: "call" }, title, given, field) };
}

/** Indents JSON; returns incomplete JSON unchanged. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
