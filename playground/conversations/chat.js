/** The chat, which shows a conversation and changes it, and the log in which it is shown. */

import { answeredBy, askedOf, Conversation } from "./conversation.js";
import { ExchangeView } from "./exchange_view.js";

const NEAR_PX = 80; // of the end, where a reader follows new text

export class Chat {
  /**
   * acts: `options()` of new views, see Choices and Pair; `ask(before, text, asked)` after an exchange; `goOn(view)`;
   * `shown(view)`, another answer is the last; `changed(conversation)`, it is to be kept.
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
    const view = this._addView(exchange, count);
    this._show();
    return view;
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
      if (!this._views.has(exchange)) this._addView(exchange, exchange.answers.length).end();
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

  _addView(exchange, count) {
    const { conversation } = this;
    const results = exchange.asked.filter(({ role }) => role === "tool");
    const view = new ExchangeView(exchange, count, this._acts.options(), {
      ask: (text) => this._askAgain(exchange, text, askedOf(text, results)),
      goOn: () => this._acts.goOn(view),
      rewrite: (text) => this._rewrite(exchange, text),
      version: (index) => {
        conversation.choose(exchange, index);
        this._change();
      },
      chosen: () => {
        this._showState();
        this._acts.changed(conversation);
      },
    });
    this._views.set(exchange, view);
    return view;
  }

  /** Shows and keeps a conversation that has changed. */
  _change() {
    this._show();
    this._acts.changed(this.conversation);
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
    this._change();
  }
}

/** A list of exchanges that scrolls to the end, unless the reader has scrolled away. */
export class Log {
  constructor(element, welcome) {
    Object.assign(this, { element, _welcome: welcome });
    this.clear();
  }

  clear() {
    this.element.replaceChildren(this._welcome());
  }

  add(...elements) {
    this.element.querySelector(".welcome")?.remove();
    this.element.append(...elements);
    this.toEnd();
  }

  /** Shows these elements only. Those that stay are not touched. */
  show(elements) {
    if (!elements.length) return this.clear();
    for (const child of [...this.element.children]) if (!elements.includes(child)) child.remove();
    this.add(...elements.slice(this.element.children.length));
  }

  /** Scrolls to new text, if the reader is near the end. */
  follow() {
    const { scrollTop, scrollHeight, clientHeight } = this.element;
    if (scrollHeight - scrollTop - clientHeight < NEAR_PX + clientHeight / 4) this.toEnd();
  }

  toEnd() {
    this.element.scrollTop = this.element.scrollHeight;
  }
}
