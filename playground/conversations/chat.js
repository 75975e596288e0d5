/** The chat: shows a conversation, changes it, and keeps it. Asks nothing of the server itself. */

import { answeredBy, askedOf, Conversation } from "./conversation.js";
import { ExchangeView } from "./exchange_view.js";

export class Chat {
  /**
   * @param {import("./log.js").Log} log
   * @param {object} acts
   * @param {() => object} acts.options of new views, see Choices and Pair
   * @param {(before: ?object, text: string, asked: object[]) => void} acts.ask puts a question after an exchange
   * @param {(view: ExchangeView) => void} acts.shown called when another answer is the last
   * @param {(conversation: Conversation) => void} acts.changed called when the conversation is to be kept
   */
  constructor(log, acts) {
    Object.assign(this, { _log: log, _acts: acts });
    this.open(new Conversation());
  }

  /** Shows a conversation. */
  open(conversation) {
    this.conversation = conversation;
    this._views = new Map();
    this._show();
  }

  /** The last exchange; null at the start. */
  get last() {
    return this.conversation.path.at(-1) ?? null;
  }

  /** The new messages of a question at the end: the results of the last answer's calls, then the text. */
  asked(text) {
    const calls = this._views.get(this.last)?.shown.chosen.calls;
    return askedOf(text, calls?.results ?? []);
  }

  /** Adds an exchange that is about to be answered. count: of answers */
  begin(before, { text, asked, model, way }, count) {
    const exchange = { text, asked, model, way, answers: [], chosen: 0, next: [], current: 0 };
    this.conversation.add(before, exchange);
    this._views.set(exchange, this._viewOf(exchange, count));
    this._show();
    return this._views.get(exchange);
  }

  /** Takes in a complete answer. */
  end(view) {
    view.end();
    this._showState();
    if (view.exchange.answers.some((answer) => answeredBy(answer).length)) this._acts.changed(this.conversation);
  }

  /** Removes an exchange that the server refused. */
  drop({ exchange }) {
    this.conversation.remove(exchange);
    this._show();
  }

  /** Shows texts formatted, or as written. */
  showText(formatted) {
    for (const view of this._views.values()) for (const card of view.shown.cards) card.show(formatted);
  }

  _show() {
    const { path } = this.conversation;
    for (const exchange of path) {
      if (this._views.has(exchange)) continue;
      const view = this._viewOf(exchange, exchange.answers.length);
      this._views.set(exchange, view);
      view.end();
    }
    this._log.show(path.map((exchange) => this._views.get(exchange).element));
    this._showState();
  }

  _showState() {
    const { path } = this.conversation;
    for (const exchange of path) {
      const versions = this.conversation.versions(exchange);
      const view = this._views.get(exchange);
      view.showVersions(versions.indexOf(exchange), versions.length);
      view.showLast(exchange === path.at(-1), () => this._acts.ask(exchange, "", this.asked("")));
    }
    this._acts.shown(this._views.get(path.at(-1)) ?? null);
  }

  _viewOf(exchange, count) {
    const { conversation } = this;
    const results = exchange.asked.filter(({ role }) => role === "tool");
    return new ExchangeView(exchange, count, this._acts.options(), {
      ask: (text) => this._askAgain(exchange, text, askedOf(text, results)),
      goOn: () => this._acts.goOn(this._views.get(exchange)),
      rewrite: (text) => this._rewrite(exchange, text),
      version: (index) => this._choose(exchange, index),
      chosen: () => {
        this._showState();
        this._acts.changed(conversation);
      },
    });
  }

  /** Asks for another version of an exchange. One without an answer is not kept beside it. */
  _askAgain(exchange, text, asked) {
    const before = this.conversation.before(exchange);
    if (!exchange.answers.some((answer) => answeredBy(answer).length)) this.conversation.remove(exchange);
    this._acts.ask(before, text, asked);
  }

  /** Adds a version of an exchange with another text as its answer. */
  _rewrite(exchange, text) {
    const answers = [exchange.answers[exchange.chosen].withText(text)];
    this.conversation.add(this.conversation.before(exchange), { ...exchange, answers, chosen: 0, next: [], current: 0 });
    this._show();
    this._acts.changed(this.conversation);
  }

  _choose(exchange, index) {
    this.conversation.choose(exchange, index);
    this._show();
    this._acts.changed(this.conversation);
  }
}
