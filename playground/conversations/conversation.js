/** A conversation: a tree of exchanges, of which one path is shown. */

import { Answer } from "../answers/answer.js";

const TITLE_LENGTH = 60;

/**
 * @typedef {object} Exchange a question and its answers
 * @property {string} text the question
 * @property {object[]} asked the API's messages: results of calls, then the question
 * @property {string} model the endpoint
 * @property {?{race: boolean, coupled: boolean}} way how answers with and without drafts are compared; null: they are not
 * @property {Answer[]} answers
 * @property {number} chosen index of the answer with which the conversation goes on
 * @property {Exchange[]} next versions of what comes after
 * @property {number} current index of the version that is shown
 */

export class Conversation {
  constructor() {
    this.id = null; // the store's; null: not kept
    this.createdMs = Date.now();
    this._root = { next: [], current: 0 };
  }

  /** The exchanges that are shown, first to last. @returns {Exchange[]} */
  get path() {
    const path = [];
    for (let exchange = currentOf(this._root); exchange; exchange = currentOf(exchange)) path.push(exchange);
    return path;
  }

  get title() {
    const text = this.path.find(({ text }) => text)?.text.trim().replace(/\s+/g, " ") ?? "";
    return text.length > TITLE_LENGTH ? `${text.slice(0, TITLE_LENGTH)}…` : text || "New conversation";
  }

  /** Adds a version of what comes after an exchange, and shows it. before: null at the start. */
  add(before, exchange) {
    const parent = before ?? this._root;
    parent.current = parent.next.push(exchange) - 1;
  }

  /** The exchange before another; null at the start. */
  before(exchange) {
    const path = this.path;
    return path[path.indexOf(exchange) - 1] ?? null;
  }

  /** All versions of an exchange that is shown. */
  versions(exchange) {
    return this._parent(exchange).next;
  }

  /** Shows another version of an exchange. */
  choose(exchange, index) {
    this._parent(exchange).current = index;
  }

  remove(exchange) {
    const parent = this._parent(exchange);
    parent.next.splice(parent.next.indexOf(exchange), 1);
    parent.current = Math.max(0, parent.next.length - 1);
  }

  _parent(exchange) {
    return this.before(exchange) ?? this._root;
  }

  /** The messages up to an exchange, then others. last: null at the start. */
  messages(system, last, asked) {
    const first = system.trim() ? [{ role: "system", content: system }] : [];
    const path = this.path.slice(0, last ? this.path.indexOf(last) + 1 : 0);
    return [...first, ...path.flatMap(messagesOf), ...asked];
  }

  /** A plain object that the browser can keep. */
  get record() {
    const { id, createdMs, title } = this;
    return { ...(id !== null && { id }), createdMs, changedMs: Date.now(), title, root: this._root };
  }

  static restored({ id, createdMs, root }) {
    return Object.assign(new Conversation(), { id, createdMs, _root: restoredOf(root) });
  }
}

/** The user's message, after the results of the model's calls. */
export function askedOf(text, results) {
  return [...results, ...(text ? [{ role: "user", content: text }] : [])];
}

/** An answer as messages; none if it is empty. @param {Answer} answer */
export function answeredBy({ text, calls }) {
  if (!calls.length) return text ? [{ role: "assistant", content: text }] : [];
  const called = ({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } });
  return [{ role: "assistant", content: text || null, tool_calls: calls.map(called) }];
}

/** An exchange as messages; none without an answer. */
function messagesOf({ asked, answers, chosen }) {
  const answered = answers.length ? answeredBy(answers[chosen]) : [];
  return answered.length ? [...asked, ...answered] : [];
}

function currentOf({ next, current }) {
  return next[current];
}

function restoredOf({ answers = [], next, ...rest }) {
  return { ...rest, answers: answers.map(Answer.restored), next: next.map(restoredOf) };
}
