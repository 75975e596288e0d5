/** One streamed answer as its client sees it: tokens, text and times. Knows nothing of the page. */

/**
 * @typedef {object} Token
 * @property {number?} id
 * @property {string} text what it adds to the answer
 * @property {string} source accepted, recovered, bonus, plain, or a member's name; "": the server did not say
 * @property {number?} logprob
 * @property {{text: string, logprob: number}[]} top the most probable ones in its place, best first
 */

export class Answer {
  constructor(beganMs) {
    this.text = "";
    /** @type {Token[]} */
    this.tokens = [];
    /** @type {Token[][]} the tokens of each of the target's steps */
    this.steps = [];
    this.finish = this.seed = this.speculation = this.usage = null;
    this.progress = this.ensemble = null; // of several models that answer together
    this.stopped = this.cached = false;
    this.error = null;
    this.beganMs = beganMs;
    this.firstMs = this.lastMs = NaN; // since it began
  }

  /** Takes in a chunk; returns the tokens that it adds. */
  take(document, nowMs) {
    this.speculation = document.speculation ?? this.speculation;
    this.usage = document.usage ?? this.usage;
    this.seed = document.seed ?? this.seed;
    this.progress = document.progress ?? null;
    const choice = document.choices[0];
    if (!choice) return [];
    const text = choice.text ?? choice.delta?.content ?? "";
    const added = tokensOf(choice, text);
    this.text += text;
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

  /** What a stop string took back is not part of the answer: tokens lose it, too. */
  settle() {
    if (this.finish === null) return;
    let room = this.text.length;
    for (const token of this.tokens) {
      token.text = token.text.slice(0, room);
      room -= token.text.length;
    }
  }

  get count() {
    return this.usage?.completion_tokens ?? this.tokens.length;
  }

  /** Of the whole time from sending on, as `consort chat` has it. */
  get tokensPerS() {
    return this.lastMs > 0 && this.count ? (this.count / this.lastMs) * 1000 : NaN;
  }

  /** Tokens per step of the target; the server's own figure, once it is there. */
  get acceptanceLength() {
    const soFar = this.steps.length ? this.tokens.length / this.steps.length : NaN;
    return this.speculation?.acceptance_length ?? soFar;
  }

  /** Accepted of drafted; the server tells at the end. */
  get acceptanceRate() {
    return this.speculation?.drafted ? this.speculation.acceptance_rate : NaN;
  }

  /** Number of tokens by source, in order of appearance. */
  get sources() {
    const counts = new Map();
    for (const { source } of this.tokens) counts.set(source, (counts.get(source) ?? 0) + 1);
    return counts;
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
  return details.map(({ id, text, source }, index) => ({ id, text, source, logprob: null, top: [], ...told[index] }));
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
