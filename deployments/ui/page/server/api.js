/** The server's HTTP interface, for the page. Every failure is an ApiError. */

import { events } from "./sse.js";

export const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };

const STATUS_TITLES = {
  400: "The request is not right",
  401: "An API key is needed",
  404: "Not found",
  408: "Out of time",
  413: "The request is too large",
  429: "The server is busy",
  503: "Not ready yet",
};

/** status: the response's; 0 without a complete response. param: the field to change. */
export class ApiError extends Error {
  constructor(message, { status = 0, param = null, retryAfterS = null } = {}) {
    super(message);
    Object.assign(this, { status, param, retryAfterS });
  }

  get title() {
    return STATUS_TITLES[this.status] ?? (this.status ? `Error ${this.status}` : "The connection failed");
  }
}

export class Api {
  /** @param {() => string} key returns the API key; "": none */
  constructor(key) {
    this._key = key;
  }

  /** The endpoints, as GET /v1/models has them. */
  async models() {
    const response = await this._fetch("v1/models", {});
    return (await response.json()).data;
  }

  /** The prompt templates, as GET /v1/templates has them. */
  async templates() {
    const response = await this._fetch("v1/templates", {});
    return (await response.json()).data;
  }

  /** Requests, totals and replicas, as GET /v1/status has them. */
  async status() {
    return (await this._fetch("v1/status", {})).json();
  }

  /**
   * Yields the documents of a streamed answer. Closing the iterator, or the signal, hangs up and stops the server.
   * opened: called with the response's headers.
   */
  async *stream(path, body, { signal, opened }) {
    const headers = { "Content-Type": "application/json" };
    const response = await this._fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    opened(response.headers);
    let complete = false;
    try {
      for await (const { name, data } of events(response.body)) {
        if (name === "error") throw errorOf(JSON.parse(data), 0, "The answer broke off");
        complete ||= data === "[DONE]";
        if (data && !complete) yield JSON.parse(data);
      }
    } catch (error) {
      if (error instanceof ApiError || error.name === "AbortError") throw error;
      throw new ApiError(`The answer broke off: ${error.message}`);
    }
    if (!complete) throw new ApiError("The answer broke off before its end.");
  }

  async _fetch(path, options) {
    const key = this._key();
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    let response;
    try {
      response = await fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(`The server can't be reached: ${error.message}`);
    }
    if (response.ok) return response;
    const retryAfterS = Number(response.headers.get("Retry-After")) || null;
    throw errorOf(await response.json().catch(() => ({})), response.status, response.statusText, retryAfterS);
  }
}

function errorOf(document, status, otherwise, retryAfterS = null) {
  const { message = otherwise, param = null } = document.error ?? {};
  return new ApiError(message, { status, param, retryAfterS });
}
