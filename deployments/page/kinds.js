/** The two kinds of request: what their texts are called, and how a prompt becomes part of one. */

export const KINDS = {
  chat: {
    label: "Message",
    placeholder: "Say something…",
    send: "Send",
    keys: "Enter sends, Shift+Enter begins a line, Esc stops",
    title: "A conversation",
    words: "The drafter proposes, the target decides. Colours show who wrote what.",
    examples: ["Write a function that reads a file.", "What does the json module do?"],
  },
  completion: {
    label: "Text to continue",
    placeholder: "A text to continue…",
    send: "Continue",
    keys: "Ctrl+Enter continues, Esc stops",
    title: "A text to continue",
    words: "The drafter proposes, the target decides. Colours show who wrote what.",
    examples: ["def read_lines(path):\n", "import os\n\nclass Cache:\n"],
  },
};

/** The turns of a conversation that went well, oldest first. */
export class Conversation {
  constructor() {
    this._turns = [];
  }

  /** The messages of a request that goes on with a text. */
  messages(system, text) {
    const first = system.trim() ? [{ role: "system", content: system }] : [];
    return [...first, ...this._turns, { role: "user", content: text }];
  }

  /** An exchange becomes part of the conversation, if there was an answer. */
  add(text, answer) {
    if (answer) this._turns.push({ role: "user", content: text }, { role: "assistant", content: answer });
  }

  /** Takes the last exchange back. */
  undo() {
    this._turns.splice(-2);
  }

  clear() {
    this._turns = [];
  }
}
