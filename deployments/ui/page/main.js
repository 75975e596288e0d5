/** The playground: connects the page's controls with requests and answers. */

import { Api, ApiError, PATHS } from "./server/api.js";
import { alternatives, curl, FieldError, parameters, read, templated } from "./request/body.js";
import { Choices } from "./answers/choices.js";
import { answeredBy, askedOf, Conversation } from "./conversations/conversation.js";
import { byId, make } from "./common/dom.js";
import { Endpoints } from "./server/endpoints.js";
import { Figures } from "./figures/figures.js";
import { Form } from "./request/form.js";
import { KINDS } from "./request/kinds.js";
import { Log } from "./conversations/log.js";
import { Pair } from "./answers/pair.js";
import { summary } from "./figures/statistics.js";
import { Tip } from "./answers/tip.js";

const KEY = "consort.key"; // in the tab's session storage, which no other tab can read

class Playground {
  constructor() {
    this._text = byId("text");
    this._key = byId("key");
    this._key.value = sessionStorage.getItem(KEY) ?? "";
    this._api = new Api(() => this._key.value);
    this._form = new Form(byId("parameters"), sessionStorage);
    this._conversation = new Conversation();
    this._running = null; // AbortController of the request in progress
    this._calls = null; // of the chat's last answer; their results are sent with the next message
    this._figures = new Figures();
    this._endpoints = new Endpoints(this._api, byId("endpoint"), byId("endpoint-facts"), () => this._askForKey());
    this._endpoints.changed = () => this._suitColours();
    const tip = new Tip(byId("tip"), announce);
    this._logs = {};
    for (const kind of Object.keys(KINDS)) {
      this._logs[kind] = new Log(byId(`${kind}-log`), KINDS[kind], (text) => this._propose(text));
      tip.watch(this._logs[kind].element);
    }
    this._listen();
    this._showKind();
    this._templates = [];
    this._endpoints.load();
    this._loadTemplates();
  }

  get _kind() {
    return document.querySelector("[name=kind]:checked").value;
  }

  _listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this._send();
    });
    for (const radio of document.querySelectorAll("[name=kind]")) radio.addEventListener("change", () => this._showKind());
    document.addEventListener("keydown", (event) => this._onKey(event));
    byId("stop").addEventListener("click", () => this._running?.abort());
    byId("clear").addEventListener("click", () => this._clear());
    byId("reset").addEventListener("click", () => this._form.reset());
    byId("colours").addEventListener("change", () => this._colour());
    byId("panel-toggle").addEventListener("click", ({ target }) => {
      target.setAttribute("aria-expanded", String(document.body.classList.toggle("panel-open")));
    });
    this._key.addEventListener("change", () => {
      sessionStorage.setItem(KEY, this._key.value);
      this._endpoints.load();
      this._loadTemplates();
    });
    byId("key-form").addEventListener("submit", (event) => event.preventDefault());
    byId("curl-details").addEventListener("toggle", () => this._showCurl());
    byId("copy").addEventListener("click", () => this._copy());
  }

  _onKey(event) {
    if (event.key === "Escape" && this._running) this._running.abort();
    if (event.key !== "Enter" || event.target !== this._text || event.isComposing) return;
    const sends = event.ctrlKey || event.metaKey || (this._kind === "chat" && !event.shiftKey);
    if (!sends) return;
    event.preventDefault();
    this._send();
  }

  _showKind() {
    const kind = this._kind;
    for (const [name, log] of Object.entries(this._logs)) log.element.hidden = name !== kind;
    this._form.showFor(kind);
    byId("text-label").textContent = KINDS[kind].label;
    byId("send").textContent = KINDS[kind].send;
    byId("keys").textContent = KINDS[kind].keys;
    this._text.placeholder = KINDS[kind].placeholder;
    this._text.classList.toggle("monospace", kind === "completion");
  }

  /** Colours by member where tokens are blended, else by source. */
  _suitColours() {
    const { blends } = this._endpoints;
    const colours = byId("colours");
    colours.querySelector("[value=member]").disabled = !blends;
    if (colours.value !== "") colours.value = blends ? "member" : "source";
    this._colour();
  }

  _colour() {
    const { value } = byId("colours");
    document.body.dataset.colours = value;
    this._figures.colour(value === "member");
  }

  /** Offers the server's templates. The picker of endpoints tells what is wrong if there is no answer. */
  async _loadTemplates() {
    try {
      this._templates = await this._api.templates();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
    }
    this._form.offer("template", [["", "none"], ...this._templates.map(({ id }) => [id, id])]);
  }

  /** The request's body, from a completion's text or a chat's messages. */
  _body(kind, text, asked) {
    const texts = this._form.texts;
    const shown = byId("alternatives").checked ? alternatives(kind, read({ name: "_top", kind: "integer" }, texts._top) ?? 0) : {};
    const set = parameters(kind, texts);
    const template = this._templates.find(({ id }) => id === set.template);
    const filled = template ? templated(template, set.variables, text) : {};
    const sent = template ? asked.filter(({ role }) => role !== "user") : asked;
    const plain = template ? {} : { prompt: text };
    const prompt = kind === "chat" ? { messages: this._conversation.messages(texts._system, sent) } : plain;
    const streamed = { stream: true, stream_options: { include_usage: true }, return_token_details: true };
    const body = { model: this._endpoints.chosen?.id ?? "", ...prompt, ...shown, ...set, ...filled, ...streamed };
    if (body.n > 1 && byId("compare").checked) throw new FieldError("n", "Compare shows one answer each: leave this blank.");
    return body;
  }

  /** The new messages of a chat: the results of the last answer's calls, then the text. */
  _asked(text) {
    return askedOf(text, this._calls?.results ?? []);
  }

  async _send() {
    const text = this._text.value;
    if (this._running || text.trim() === "") return;
    if (this._kind === "chat") this._text.value = "";
    await this._ask(this._kind, text, this._asked(text));
  }

  /** Sends only the results of the last answer's calls. */
  async _sendResults() {
    if (!this._running) await this._ask("chat", "", this._asked(""));
  }

  async _ask(kind, text, asked) {
    this._form.clearMark();
    let body;
    try {
      body = this._body(kind, text, asked);
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      this._text.value ||= text;
      return this._openPanel(() => this._form.mark(error.field, error.message));
    }
    await this._exchange(kind, text, asked, body);
  }

  /** Runs one request, or two to compare them, to the end. */
  async _exchange(kind, text, asked, body) {
    const log = this._logs[kind];
    const changed = ({ answer }) => {
      log.follow();
      if (answer === shown.chosen.answer) this._figures.follow(answer);
    };
    const options = { prompt: kind === "chat" ? "" : text, monospace: kind === "completion", changed };
    const shown = byId("compare").checked
      ? new Pair(this._comparison(body), options)
      : new Choices(body.model, body.n ?? 1, options);
    const question = kind === "chat" && text ? [make("div", { className: "asked", textContent: text })] : [];
    log.add(...question, shown.element);
    await this._whileRunning((signal) => shown.run(this._api, PATHS[kind], body, signal));
    this._finish(shown);
    if (kind === "chat") this._goOn(text, asked, shown, [...question, shown.element]);
    else for (const card of shown.cards) card.offer("Go on from here", () => this._propose(text + card.answer.text));
  }

  /** How to compare a request with and without drafts. */
  _comparison(body) {
    const verification = body.verification ?? this._endpoints.chosen?.verification ?? "coupled";
    return { race: this._form.texts._race === "race", coupled: verification === "coupled" };
  }

  async _whileRunning(run) {
    this._running = new AbortController();
    byId("clear").disabled = true;
    swap(byId("send"), byId("stop"));
    try {
      await run(this._running.signal);
    } finally {
      this._running = null;
      byId("clear").disabled = false;
      swap(byId("stop"), byId("send"));
    }
  }

  _finish({ chosen: { answer } }) {
    this._figures.show(answer);
    for (const log of Object.values(this._logs)) log.follow();
    if (answer.error) this._explain(answer.error);
    else announce(`The answer is complete: ${summary(answer)}`);
  }

  /** Adds an exchange to the conversation; the last one can be repeated. */
  _goOn(text, asked, shown, elements) {
    const calls = this._calls; // those whose results this exchange sent
    const succeeded = shown.cards.some(({ answer }) => answeredBy(answer).length > 0);
    if (succeeded) {
      calls?.close();
      document.querySelectorAll("#chat-log .choose input").forEach((radio) => (radio.disabled = !elements.at(-1).contains(radio)));
      this._conversation.add(asked, () => answeredBy(shown.chosen.answer));
      this._choose(shown);
      for (const card of shown.cards) card.head.addEventListener("change", () => this._choose(shown));
    } else this._text.value ||= text;
    document.querySelectorAll("#chat-log .card-actions").forEach((actions) => actions.replaceChildren());
    shown.cards.at(-1).offer("Again", () => {
      if (this._running) return;
      if (succeeded) this._conversation.undo();
      this._calls = calls;
      elements.forEach((element) => element.remove());
      this._ask("chat", text, asked);
    });
  }

  /** Continues the conversation with the chosen answer and the results of its calls. */
  _choose({ chosen }) {
    this._calls?.close();
    this._calls = chosen.answer.calls.length ? chosen.calls : null;
    this._calls?.offer(() => this._sendResults());
    this._figures.show(chosen.answer);
  }

  _explain(error) {
    if (error.status === 401) this._askForKey();
    else if (error.param) this._openPanel(() => this._form.mark(error.param, error.message));
  }

  _askForKey() {
    byId("key-details").open = true;
    this._openPanel(() => this._key.focus());
  }

  /** Opens the panel if it is closed, then acts in it. */
  _openPanel(act) {
    const toggle = byId("panel-toggle");
    if (toggle.offsetParent && toggle.getAttribute("aria-expanded") === "false") toggle.click();
    act();
  }

  _clear() {
    if (this._kind === "chat") {
      this._conversation.clear();
      this._calls = null;
    }
    this._logs[this._kind].clear();
    this._figures.show(null);
    this._text.focus();
  }

  _propose(text) {
    this._text.value = text;
    this._text.focus();
  }

  _showCurl() {
    let command;
    try {
      const [kind, text] = [this._kind, this._text.value];
      const body = this._body(kind, text, this._asked(text));
      command = curl(new URL(PATHS[kind], document.baseURI).href, body, this._key.value !== "");
    } catch (error) {
      command = error.message;
    }
    byId("curl").textContent = command;
  }

  async _copy() {
    this._showCurl();
    try {
      await navigator.clipboard.writeText(byId("curl").textContent);
      announce("Copied.");
    } catch {
      getSelection().selectAllChildren(byId("curl")); // the clipboard needs TLS or localhost
    }
  }
}

/** Announces a text to screen readers. */
function announce(words) {
  byId("announcer").textContent = words;
}

/** Replaces a button by another, which also gets the keyboard's focus. */
function swap(before, after) {
  const focused = document.activeElement === before;
  before.hidden = true;
  after.hidden = false;
  if (focused) after.focus();
}

new Playground();
