/** One streamed answer as its client sees it: tokens, text, calls and times. Knows nothing of the page. */

/**
 * @typedef {object} Token
 * @property {number?} id
 * @property {string} text what it adds to the answer
 * @property {string} source accepted, recovered, bonus or plain; "": the server did not say
 * @property {{model: string, logprob: number, agreed: boolean, share: number}[]} members what those of an ensemble thought
 * @property {number?} logprob
 * @property {{text: string, logprob: number}[]} top the most probable ones in its place, best first
 */

/** @typedef {{id: string, name: string, arguments: string}} Call what the model wants called, as far as it has come */

export class Answer {
  /** @param {{index?: number, alone?: boolean}} [place] which of the request's answers it is; whether it is the only one */
  constructor(beganMs, { index = 0, alone = true } = {}) {
    this.text = "";
    /** @type {Token[]} */
    this.tokens = [];
    /** @type {Token[][]} the tokens of each of the target's steps */
    this.steps = [];
    /** @type {Call[]} */
    this.calls = [];
    this.finish = this.seed = null;
    this.speculation = this.usage = null; // of all answers to the request together
    this.progress = this.ensemble = null; // of several models that answer together
    this.stopped = this.cached = false;
    this.error = null;
    this.index = index;
    this.alone = alone;
    this.beganMs = beganMs;
    this.firstMs = this.lastMs = NaN; // since it began
  }

  /** Takes in a chunk, which may be another answer's; returns the tokens that it adds. */
  take(document, nowMs) {
    this.speculation = document.speculation ?? this.speculation;
    this.usage = document.usage ?? this.usage;
    this.seed = document.seed ?? this.seed;
    this.progress = document.progress ?? null;
    const choice = document.choices.find(({ index }) => index === this.index);
    if (!choice) return [];
    const text = choice.text ?? choice.delta?.content ?? "";
    const added = tokensOf(choice, text);
    this.text += text;
    for (const piece of choice.delta?.tool_calls ?? []) this._takeCall(piece);
    this.ensemble = choice.ensemble ?? this.ensemble;
    this.finish = choice.finish_reason ?? this.finish;
    if (added.length || this.finish) {
      this.lastMs = nowMs - this.beganMs;
      if (Number.isNaN(this.firstMs)) this.firstMs = this.lastMs;
    }
    this.tokens.push(...added);
    this.steps.push(...stepsOf(added));
    return added;
  }

  /** A call comes whole, or in pieces: its name first, then its arguments. */
  _takeCall({ index = this.calls.length, id, function: called }) {
    const call = (this.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name ||= called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }

  /** What a stop string took back is not part of the answer: tokens lose it, too. Calls are not part of its text at all. */
  settle() {
    if (this.finish === null || this.calls.length) return;
    let room = this.text.length;
    for (const token of this.tokens) {
      token.text = token.text.slice(0, room);
      room -= token.text.length;
    }
  }

  /** All that the model wrote, calls included. */
  get written() {
    return this.calls.length ? this.tokens.map(({ text }) => text).join("") : this.text;
  }

  get count() {
    return (this.alone && this.usage?.completion_tokens) || this.tokens.length;
  }

  /** Of the whole time from sending on, as `consort chat` has it. */
  get tokensPerS() {
    return this.lastMs > 0 && this.count ? (this.count / this.lastMs) * 1000 : NaN;
  }

  /** Tokens per step of the target; the server's own figure, once it is there. */
  get acceptanceLength() {
    const soFar = this.steps.length ? this.tokens.length / this.steps.length : NaN;
    return (this.alone && this.speculation?.acceptance_length) || soFar;
  }

  /** Accepted of drafted, in all answers to the request; the server tells at the end. */
  get acceptanceRate() {
    return this.speculation?.drafted ? this.speculation.acceptance_rate : NaN;
  }
}

/**
 * The tokens of one chunk, cut into the target's steps. A server sends a chunk for each step; should it join some, the
 * step still ends at the one token of the target's own, which follows the accepted ones.
 */
export function stepsOf(tokens) {
  const steps = [];
  let open = [];
  for (const token of tokens) {
    open.push(token);
    if (token.source !== "accepted") {
      steps.push(open);
      open = [];
    }
  }
  return open.length ? [...steps, open] : steps; // the last one, where the answer ended within its draft
}

/** @returns {Token[]} */
function tokensOf(choice, text) {
  const details = choice.token_details ?? (text ? [{ id: null, text, source: "" }] : []);
  const told = choice.logprobs?.content?.map(fromChat) ?? fromCompletion(choice.logprobs);
  return details.map(({ id, text, source, members = [] }, index) => ({
    ...{ id, text, source, members, logprob: null, top: [] },
    ...told[index],
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
      .sort((one, other) => other.logprob - one.logprob),
  }));
}
