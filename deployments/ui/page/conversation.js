/** A conversation as the API's messages. Its last answer may still be chosen among several, and what it calls return. */

export class Conversation {
  constructor() {
    this._exchanges = []; // asked: messages; answered: gives messages
  }

  /** The messages of a request that goes on with others. */
  messages(system, asked) {
    const first = system.trim() ? [{ role: "system", content: system }] : [];
    const before = this._exchanges.flatMap((exchange) => [...exchange.asked, ...exchange.answered()]);
    return [...first, ...before, ...asked];
  }

  /** An exchange becomes part of the conversation. answered: gives the answer's messages, which may change until the next. */
  add(asked, answered) {
    const last = this._exchanges.at(-1);
    if (last) {
      const fixed = last.answered();
      last.answered = () => fixed;
    }
    this._exchanges.push({ asked, answered });
  }

  /** Takes the last exchange back. */
  undo() {
    this._exchanges.pop();
  }

  clear() {
    this._exchanges = [];
  }
}

/** What a user says, after the results of what the model called. */
export function askedOf(text, results) {
  return [...results, ...(text ? [{ role: "user", content: text }] : [])];
}

/** An answer as messages: none, where it is empty. @param {import("./answer.js").Answer} answer */
export function answeredBy({ text, calls }) {
  if (!calls.length) return text ? [{ role: "assistant", content: text }] : [];
  const called = calls.map(({ id, name, arguments: given }) => ({
    ...{ id, type: "function", function: { name, arguments: given } },
  }));
  return [{ role: "assistant", content: text || null, tool_calls: called }];
}
