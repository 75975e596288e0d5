/** The calls in an answer: a card for each, with a field for its result. The page itself calls nothing. */

import { button, facts, make } from "../dom.js";

export class Calls {
  constructor() {
    this._send = button("Send results", () => this._act(), { className: "main", hidden: true });
    this.element = make("div", { className: "calls", hidden: true }, this._send);
    this._cards = [];
  }

  show(calls) {
    this.element.hidden = false;
    calls.forEach((call, index) => {
      if (!this._cards[index]) this._send.before((this._cards[index] = cardOf(index)).element);
      const card = this._cards[index];
      card.id = call.id;
      card.name.textContent = call.name;
      card.given.textContent = pretty(call.arguments);
    });
  }

  /** Shows the fields for results, and the button that sends them by `act`. */
  offer(act) {
    this._act = act;
    this._send.hidden = false;
    for (const { field, result } of this._cards) field.hidden = result.readOnly = false;
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
    return this._cards.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result.value }));
  }
}

function cardOf(index) {
  const name = make("code", { className: "call-name" });
  const given = make("pre", { className: "call-arguments", tabIndex: 0, "aria-label": `Arguments of call ${index + 1}` });
  const result = make("textarea", { rows: 2, spellcheck: false, placeholder: "What it returns…" });
  const field = make("label", { className: "call-result", hidden: true }, `Result of call ${index + 1}`, result);
  const element = make("section", { className: "call box" }, make("p", {}, facts("calls "), name), given, field);
  return { name, given, result, field, element };
}

/** Indents JSON; returns incomplete JSON unchanged. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
