/** The two kinds of request, with their labels. Data only. */

export const KINDS = {
  chat: {
    label: "Message",
    placeholder: "Say something…",
    send: "Send",
    clear: "New chat",
    keys: "Shift+Enter: new line",
    title: "A conversation",
    words: "The drafter proposes, the target decides. Colours show who wrote what.",
    examples: ["Give me three tips to sleep better.", "Why is the sky blue?"],
  },
  completion: {
    label: "Text to continue",
    placeholder: "A text to continue…",
    send: "Continue",
    clear: "Clear",
    keys: "Ctrl+Enter: continue",
    title: "A text to continue",
    words: "The drafter proposes, the target decides. Colours show who wrote what.",
    examples: ["The best way to learn a language is", "Once upon a time, in a small village,"],
  },
};
