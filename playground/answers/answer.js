/** One streamed answer as its client sees it: tokens, text, calls and times. */

/**
 * @typedef {object} Token
 * @property {number?} id
 * @property {string} text what it adds to the answer
 * @property {string} source accepted, recovered, bonus or plain; "": unknown
 * @property {boolean} thought whether it is part of the reasoning
 * @property {boolean} [differs] from the answer beside it
 * @property {?string} proposer who drafted it, if it was accepted
 * @property {{model: string, logprob: number, agreed: boolean, share: number}[]} members of an ensemble
 * @property {number?} logprob
 * @property {{text: string, logprob: number}[]} top the most probable tokens at its position, best first
 */

/** @typedef {{id: string, name: string, arguments: string}} Call a call by the model, so far */

/** Has plain values only, which the browser can keep. */
export class Answer {
  /** @param {{index?: number, alone?: boolean}} [choice] index among the request's answers; whether it is the only one */
  constructor(beganMs, { index = 0, alone = true } = {}) {
    this.text = "";
    this.reasoning = "";
    /** @type {Token[]} */
    this.tokens = [];
    /** @type {Token[][]} the tokens of each of the target's steps */
    this.steps = [];
    /** @type {Call[]} */
    this.calls = [];
    this.finish = this.seed = null;
    this.speculation = this.usage = null; // of all answers to the request together
    this.progress = this.ensemble = null; // of an ensemble
    this.stopped = this.cached = this.edited = false;
    this.speculates = true; // whether the request may have drafts
    this.error = null;
    this.index = index;
    this.alone = alone;
    this.kept = 0; // tokens from before the answer was continued
    this.beganMs = beganMs;
    this.firstMs = this.lastMs = NaN; // since it began
  }

  /** Begins to stream, or goes on where the answer ended. */
  begin(nowMs) {
    const times = { beganMs: nowMs, firstMs: NaN, lastMs: NaN };
    Object.assign(this, times, { kept: this.count, usage: null, stopped: false, error: null });
  }

  /** Takes in a chunk, which may be for another answer; returns whether it brought tokens. */
  take(document, nowMs) {
    this.speculation = document.speculation ?? this.speculation;
    this.usage = document.usage ?? this.usage;
    this.seed = document.seed ?? this.seed;
    const isMine = document.choices.some(({ index }) => index === this.index);
    this.progress = (isMine && document.progress) || null;
    const before = this.tokens.length;
    for (const choice of document.choices) if (choice.index === this.index) this._takeChoice(choice, nowMs);
    return this.tokens.length > before;
  }

  _takeChoice(choice, nowMs) {
    const text = choice.text ?? choice.delta?.content ?? "";
    const thought = choice.delta?.reasoning_content ?? "";
    const added = tokensOf(choice, text || thought, thought !== "" && text === "");
    this.text += text;
    this.reasoning += thought;
    for (const piece of choice.delta?.tool_calls ?? []) this._takeCall(piece);
    this.ensemble = choice.ensemble ?? this.ensemble;
    this.finish = choice.finish_reason ?? this.finish;
    if (added.length || this.finish) {
      this.lastMs = nowMs - this.beganMs;
      if (Number.isNaN(this.firstMs)) this.firstMs = this.lastMs;
    }
    this.tokens.push(...added);
    this.steps.push(...stepsOf(added));
  }

  /** Takes in a call, complete or in pieces: first its name, then its arguments. */
  _takeCall({ index = this.calls.length, id, function: called }) {
    const call = (this.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name ||= called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }

  /** Cuts the text that a stop string removed from the tokens, too. Calls are not part of the text. */
  settle() {
    if (this.finish === null || this.calls.length || this.reasoning) return;
    let room = this.text.length;
    for (const token of this.tokens) {
      token.text = token.text.slice(0, room);
      room -= token.text.length;
    }
  }

  /** Marks the tokens from a character of the model's output on. */
  markFrom(index) {
    let end = 0;
    for (const token of this.tokens) {
      end += token.text.length;
      token.differs = end > index;
    }
  }

  /** The answer that the browser kept. */
  static restored(record) {
    return Object.assign(new Answer(0), record);
  }

  /** The same answer with another text, which no model wrote. */
  withText(text) {
    const { calls, reasoning, finish } = this;
    return Object.assign(new Answer(0), { text, calls, reasoning, finish, edited: true });
  }

  /** Whether the model can go on where it ended by its length. */
  get isCut() {
    return this.finish === "length" && this.alone && this.text !== "" && !this.calls.length && !this.edited;
  }

  /** The model's output, calls included. */
  get written() {
    return this.calls.length || this.reasoning ? this.tokens.map(({ text }) => text).join("") : this.text;
  }

  get count() {
    return this.alone && this.usage?.completion_tokens ? this.kept + this.usage.completion_tokens : this.tokens.length;
  }

  /** Over the time since sending, as in `consort chat`. */
  get tokensPerS() {
    const written = this.count - this.kept;
    return this.lastMs > 0 && written > 0 ? (written / this.lastMs) * 1000 : NaN;
  }

  /** Tokens per step of the target; the server's figure once it is known. */
  get acceptanceLength() {
    const soFar = this.steps.length ? this.tokens.length / this.steps.length : NaN;
    return (this.alone && this.speculation?.acceptance_length) || soFar;
  }

  /** Accepted of drafted, in all answers to the request; known at the end. */
  get acceptanceRate() {
    return this.speculation?.drafted ? this.speculation.acceptance_rate : NaN;
  }
}

/** Splits the tokens of a chunk into the target's steps. Each ends with the target's own token, after the accepted ones. */
export function stepsOf(tokens) {
  const steps = [[]];
  for (const token of tokens) {
    steps.at(-1).push(token);
    if (token.source !== "accepted") steps.push([]);
  }
  return steps.filter((step) => step.length); // the answer may end within a draft
}

function tokensOf(choice, text, thought) {
  const details = choice.token_details ?? (text ? [{ id: null, text, source: "" }] : []);
  const logprobs = choice.logprobs?.content?.map(fromChat) ?? fromCompletion(choice.logprobs);
  return details.map(({ id, text, source, proposer = null, members = [] }, index) => ({
    ...{ id, text, source, proposer, members, thought, logprob: null, top: [] },
    ...logprobs[index],
  }));
}

function fromChat({ logprob, top_logprobs: top }) {
  return { logprob, top: top.map((other) => ({ text: other.token, logprob: other.logprob })) };
}

function fromCompletion(logprobs) {
  return (logprobs?.token_logprobs ?? []).map((logprob, index) => ({
    logprob,
    top: Object.entries(logprobs.top_logprobs[index] ?? {})
      .map(([text, logprob]) => ({ text, logprob }))
      .sort((left, right) => right.logprob - left.logprob),
  }));
}
