/** The two kinds of request with their labels, and the parameters in groups, with their help. Data only. */

export const KINDS = {
  chat: {
    label: "Message",
    placeholder: "Say something…",
    send: "Send",
    clear: "New chat",
    keys: "Shift+Enter: new line",
    title: "A conversation",
    examples: ["Give me three tips to sleep better.", "Why is the sky blue?"],
  },
  completion: {
    label: "Text to continue",
    placeholder: "A text to continue…",
    send: "Continue",
    clear: "Clear",
    keys: "Ctrl+Enter: continue",
    title: "A text to continue",
    examples: ["The best way to learn a language is", "Once upon a time, in a small village,"],
  },
};

/**
 * A field has the API's `name`, or one that begins with "_" and becomes other fields; a `value` if it is not left out of
 * the request by default; `blank`, a placeholder; and `only` if it is for one kind of request.
 */

const TOOL = `[{"type": "function", "function": {
  "name": "weather",
  "parameters": {"type": "object", "properties":
    {"city": {"type": "string"}}}}}]`;

/** @type {{title: string, open?: boolean, only?: "chat"|"completion", fields: Field[]}[]} */
export const GROUPS = [
  {
    title: "Basics",
    open: true,
    fields: [
      { name: "_system", label: "System message", kind: "text", only: "chat", help: "Goes before the conversation and tells the model how to answer." },
      { name: "max_tokens", label: "Most tokens", kind: "integer", blank: "the model's", min: 1, help: "The answer ends after so many tokens. Blank: in chat as many as the context has room for, in completions 256." },
      { name: "temperature", label: "Temperature", kind: "number", blank: "endpoint's", min: 0, step: 0.1, help: "0 always takes the most probable token. Higher values vary more; 1 is the model's own distribution." },
      { name: "top_p", label: "Top p", kind: "number", blank: "endpoint's", min: 0, max: 1, step: 0.05, help: "Samples from the fewest tokens that together are this probable. 1: from all." },
      { name: "n", label: "Answers", kind: "integer", blank: "1", min: 1, max: 16, help: "So many answers to the same prompt, side by side. A conversation goes on with the one that you choose." },
      { name: "seed", label: "Seed", kind: "integer", blank: "drawn", help: "The same seed gives the same text. Blank: a new one each time; it stands below the answer." },
    ],
  },
  {
    title: "Speculation",
    open: true,
    fields: [
      { name: "speculate", label: "Use drafts", kind: "switch", value: "true", help: "Off: the target writes alone, token by token. The text stays the same, the speed does not." },
      { name: "draft_length", label: "Draft length γ", kind: "integer", blank: "endpoint's", min: 0, max: 32, help: "The most draft tokens that one step of the target verifies. Longer is not always faster." },
      { name: "verification", label: "Verification", kind: "choice", choices: [["", "endpoint's"], ["coupled", "coupled"], ["rejection", "rejection"]], help: "Coupled: drafter and target share their randomness, so drafts never change the text. Rejection: the classical rule, which keeps the distribution." },
      { name: "_race", label: "Compare", kind: "choice", choices: [["", "in turn"], ["race", "at once"]], help: "In turn, neither slows the other down. At once, both share the steps of the target." },
    ],
  },
  {
    title: "Sampling",
    fields: [
      { name: "top_k", label: "Top k", kind: "integer", blank: "off", min: 0, help: "Samples from the k most probable tokens only." },
      { name: "min_p", label: "Min p", kind: "number", blank: "off", min: 0, max: 1, step: 0.01, help: "Drops tokens less probable than this share of the most probable one." },
      { name: "typical_p", label: "Typical p", kind: "number", blank: "1", min: 0, max: 1, step: 0.05, help: "Locally typical sampling: prefers tokens that surprise as much as one would expect." },
      { name: "logit_bias", label: "Logit bias", kind: "json", help: 'Added to the logits of single tokens, by id: {"42": -100} forbids token 42.' },
    ],
  },
  {
    title: "Repetition",
    fields: [
      { name: "repetition_penalty", label: "Repetition penalty", kind: "number", blank: "1", min: 0, step: 0.05, help: "Above 1, tokens that the prompt or the answer has already get less probable." },
      { name: "presence_penalty", label: "Presence penalty", kind: "number", blank: "0", min: -2, max: 2, step: 0.1, help: "Taken off the logits of tokens that the answer has already." },
      { name: "frequency_penalty", label: "Frequency penalty", kind: "number", blank: "0", min: -2, max: 2, step: 0.1, help: "The same, once for every time that the token came." },
      { name: "no_repeat_ngram_size", label: "No repeated n-grams", kind: "integer", blank: "off", min: 0, help: "No n-gram of this size appears twice." },
    ],
  },
  {
    title: "Where it ends",
    fields: [
      { name: "stop", label: "Stop at", kind: "lines", help: "The answer ends right before any of these texts, one to a line. \\n stands for a line break." },
      { name: "min_tokens", label: "Fewest tokens", kind: "integer", blank: "0", min: 0, help: "The answer does not end before so many tokens." },
      { name: "ignore_eos", label: "Go on after the end", kind: "switch", help: "On: end-of-text tokens don't end the answer; only the most tokens do." },
      { name: "timeout_s", label: "Time limit, s", kind: "number", blank: "endpoint's", min: 0, help: "After so many seconds the request fails." },
    ],
  },
  {
    title: "Tools",
    only: "chat",
    fields: [
      { name: "tools", label: "Functions", kind: "list", blank: TOOL, help: "What the model may call, as the API has it: a JSON array. The page calls nothing: it shows the calls, and you enter what they return. The model's chat template must support tools." },
      { name: "tool_choice", label: "Calls", kind: "choice", choices: [["", "if the model wants"], ["required", "required"], ["none", "none"]], help: "Required: the answer can be nothing but calls that fit the functions' parameters." },
    ],
  },
  {
    title: "Template",
    fields: [
      { name: "template", label: "Prompt template", kind: "choice", choices: [["", "none"]], help: "One of the server's templates. What you write is its first variable that is not set below." },
      { name: "variables", label: "Other variables", kind: "json", help: 'The template\'s other variables, for example {"language": "French"}.' },
      { name: "examples", label: "Examples", kind: "list", help: 'A JSON array of few-shot examples: [{"variables": {"text": "…"}, "answer": "…"}].' },
    ],
  },
  {
    title: "Structure and more",
    fields: [
      { name: "_structure", label: "The answer must be", kind: "choice", choices: [["", "anything"], ["json_object", "a JSON object"], ["json", "JSON by a schema"], ["regex", "a match of a regular expression"], ["choice", "one of some texts"], ["grammar", "by a grammar (Lark)"]], help: "The model can only write what fits, unless it is cut off at the most tokens." },
      { name: "_definition", label: "Schema, expression, texts or grammar", kind: "text", help: "What the line above asks for. Texts: one to a line." },
      { name: "_top", label: "Alternatives per token", kind: "integer", value: "5", min: 0, max: 20, help: "With Alternatives on, how many of the most probable tokens to show at each position." },
      { name: "_more", label: "More fields, as JSON", kind: "json", help: 'Any other field of the API, for example {"eta_cutoff": 0.001}.' },
    ],
  },
];

export const FIELDS = GROUPS.flatMap(({ only, fields }) => fields.map((field) => ({ only, ...field })));
