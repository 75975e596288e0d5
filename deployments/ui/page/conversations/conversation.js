/** A conversation as the API's messages. The choice of the last answer and its calls' results may still change. */

export class Conversation {
  constructor() {
    this._exchanges = []; // asked: messages; answered: returns messages
  }

  /** The messages of a request that adds others. */
  messages(system, asked) {
    const first = system.trim() ? [{ role: "system", content: system }] : [];
    const before = this._exchanges.flatMap((exchange) => [...exchange.asked, ...exchange.answered()]);
    return [...first, ...before, ...asked];
  }

  /** Adds an exchange. answered: returns the answer's messages, which may change until the next exchange. */
  add(asked, answered) {
    const last = this._exchanges.at(-1);
    if (last) {
      const fixed = last.answered();
      last.answered = () => fixed;
    }
    this._exchanges.push({ asked, answered });
  }

  /** Removes the last exchange. */
  undo() {
    this._exchanges.pop();
  }

  clear() {
    this._exchanges = [];
  }
}

/** The user's message, after the results of the model's calls. */
export function askedOf(text, results) {
  return [...results, ...(text ? [{ role: "user", content: text }] : [])];
}

/** An answer as messages; none if it is empty. @param {import("../answers/answer.js").Answer} answer */
export function answeredBy({ text, calls }) {
  if (!calls.length) return text ? [{ role: "assistant", content: text }] : [];
  const called = calls.map(({ id, name, arguments: given }) => ({
    ...{ id, type: "function", function: { name, arguments: given } },
  }));
  return [{ role: "assistant", content: text || null, tool_calls: called }];
}
