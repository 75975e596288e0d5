/** The server's HTTP interface, for the page. Every failure is an ApiError. */

export const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };

const NO_EVENT = "0"; // asks for ids of events, after which a repeated request goes on
const TRY_AGAIN = [429, 500, 503]; // statuses while a server comes back
const PATIENCE_MS = 30_000;
const PAUSE_MS = 500;

const STATUS_TITLES = {
  400: "The request is not right",
  401: "An API key is needed",
  404: "Not found",
  408: "Out of time",
  413: "The request is too large",
  429: "The server is busy",
  503: "Not ready yet",
};

/**
 * status: the response's; 0 without a complete response. param: the field to change.
 * passing: whether the server may answer when it is asked again.
 */
export class ApiError extends Error {
  constructor(message, { status = 0, param = null, retryAfterS = null, passing = false } = {}) {
    super(message);
    Object.assign(this, { status, param, retryAfterS, passing });
  }

  get title() {
    return STATUS_TITLES[this.status] ?? (this.status ? `Error ${this.status}` : "The connection failed");
  }
}

export class Api {
  constructor(key) {
    this._key = key;
  }

  /** The JSON document at a path. */
  async get(path) {
    return (await this._fetch(path, {})).json();
  }

  /**
   * Yields the documents of a streamed answer. Closing the iterator, or the signal, hangs up and stops the server.
   * A stream that breaks off is resumed after its last event. opened: called with the first response's headers.
   */
  async *stream(path, body, { signal, opened }) {
    const progress = { lastId: NO_EVENT };
    let brokenMs = null;
    for (;;) {
      try {
        for await (const document of this._documents(path, body, progress, { signal, opened })) {
          brokenMs = null;
          yield document;
        }
        return;
      } catch (error) {
        brokenMs ??= performance.now();
        const resumable = progress.lastId !== NO_EVENT && error.passing;
        if (!resumable || performance.now() - brokenMs > PATIENCE_MS) throw error;
        await new Promise((resume) => setTimeout(resume, PAUSE_MS));
      }
    }
  }

  /** Yields the documents after an event, and notes the last. */
  async *_documents(path, body, progress, { signal, opened }) {
    const headers = { "Content-Type": "application/json", "Last-Event-ID": progress.lastId };
    const response = await this._fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    if (progress.lastId === NO_EVENT) opened(response.headers);
    try {
      for await (const { name, data, id } of events(response.body)) {
        if (name === "error") throw errorOf(JSON.parse(data), 0, "The answer broke off");
        if (data === "[DONE]") return;
        progress.lastId = id ?? progress.lastId;
        if (data) yield JSON.parse(data);
      }
    } catch (error) {
      if (error instanceof ApiError || error.name === "AbortError") throw error;
      throw new ApiError(`The answer broke off: ${error.message}`, { passing: true });
    }
    throw new ApiError("The answer broke off before its end.", { passing: true });
  }

  async _fetch(path, options) {
    const key = this._key();
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    let response;
    try {
      response = await fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(`The server can't be reached: ${error.message}`, { passing: true });
    }
    if (response.ok) return response;
    const retryAfterS = Number(response.headers.get("Retry-After")) || null;
    throw errorOf(await response.json().catch(() => ({})), response.status, response.statusText, retryAfterS);
  }
}

function errorOf(document, status, otherwise, retryAfterS = null) {
  const { message = otherwise, param = null } = document.error ?? {};
  return new ApiError(message, { status, param, retryAfterS, passing: TRY_AGAIN.includes(status) });
}

/** Yields server-sent events. Without a name, an event is a "message". */
async function* events(stream) {
  let rest = "";
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      yield* blocks.map(parsed);
    }
  } finally {
    reader.cancel().catch(() => {}); // already closed by an abort
  }
}

function parsed(block) {
  const event = { name: "message", data: "", id: null };
  for (const line of block.split(/\r?\n/)) {
    const [, field, value] = /^(\w*): ?(.*)$/s.exec(line) ?? [];
    if (field === "event") event.name = value;
    if (field === "id") event.id = value;
    if (field === "data") event.data += event.data ? `\n${value}` : value;
  }
  return event;
}
