/** What an answer wants called: a card for each call, with room for what it returns. Calls nothing itself. */

import { make } from "./dom.js";

export class Calls {
  constructor() {
    this.element = make("div", { className: "calls", hidden: true });
    this._send = make("button", { type: "button", className: "main", textContent: "Send results", hidden: true });
    this._calls = [];
    this._cards = [];
    this.element.append(this._send);
  }

  /** @param {import("./answer.js").Call[]} calls as far as they have come */
  show(calls) {
    this.element.hidden = false;
    this._calls = calls;
    calls.forEach((call, index) => {
      if (!this._cards[index]) this._send.before((this._cards[index] = cardOf(index)).element);
      this._cards[index].name.textContent = call.name;
      this._cards[index].given.textContent = pretty(call.arguments);
    });
  }

  /** Lets results be entered; act: called when they should be sent. */
  offer(act) {
    this._cards.forEach(({ field }) => (field.hidden = false));
    this._send.hidden = false;
    this._send.onclick = act;
  }

  /** The results are on their way, and can't be changed any more. */
  close() {
    this._send.hidden = true;
    for (const { field, result } of this._cards) {
      result.readOnly = true;
      field.hidden = result.value === "";
    }
  }

  /** A message for each call, as the API has them. */
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

/** JSON in lines; what is not whole yet as it is. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
