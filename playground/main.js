/** The playground: connects the page's controls with requests and answers. */

import { Choices } from "./answers/choices.js";
import { Pair } from "./answers/pair.js";
import { reasonOf } from "./answers/rests.js";
import { Tip } from "./answers/tip.js";
import { copies } from "./common/clipboard.js";
import { byId } from "./common/dom.js";
import { Chat } from "./conversations/chat.js";
import { Conversation } from "./conversations/conversation.js";
import { ConversationList } from "./conversations/list.js";
import { Log } from "./conversations/log.js";
import { Store } from "./conversations/store.js";
import { Figures } from "./figures/figures.js";
import { Replicas } from "./figures/replicas.js";
import { summary } from "./figures/statistics.js";
import { alternatives, curl, FieldError, parameters, read, templated } from "./request/body.js";
import { Form } from "./request/form.js";
import { KINDS } from "./request/kinds.js";
import { Api, ApiError, PATHS } from "./server/api.js";
import { Endpoints } from "./server/endpoints.js";

// In the tab's session storage, which no other tab can read:
const KEY = "consort.key";
const OPEN = "consort.conversation";

class Playground {
  constructor() {
    this._text = byId("text");
    this._key = byId("key");
    this._key.value = sessionStorage.getItem(KEY) ?? "";
    this._api = new Api(() => this._key.value);
    this._form = new Form(byId("parameters"), sessionStorage);
    this._running = null; // AbortController of the request in progress
    this._figures = new Figures();
    new Replicas(byId("replicas-details"), byId("replicas"), this._api);
    this._endpoints = new Endpoints(this._api, byId("endpoint"), byId("endpoint-facts"), () => this._askForKey());
    this._endpoints.changed = () => this._suitColours();
    const tip = new Tip(byId("tip"), announce);
    this._logs = {};
    for (const kind of Object.keys(KINDS)) {
      this._logs[kind] = new Log(byId(`${kind}-log`), KINDS[kind], (text) => this._propose(text));
      tip.watch(this._logs[kind].element);
    }
    this._openChat();
    this._listen();
    this._showKind();
    this._templates = [];
    this._endpoints.load();
    this._loadTemplates();
  }

  get _kind() {
    return document.querySelector("[name=kind]:checked").value;
  }

  /** Shows the conversation that the tab had before a reload, or a new one. */
  async _openChat() {
    const store = new Store();
    this._chat = new Chat(this._logs.chat, {
      options: () => this._options("chat", ""),
      ask: (before, text, asked) => this._askChat(before, text, asked),
      goOn: (view) => this._goOn(view),
      shown: (view) => this._figures.show(view?.shown.chosen.answer ?? null),
      changed: (conversation) => this._keep(conversation),
    });
    this._list = new ConversationList(byId("conversations"), store, {
      open: (conversation) => this._show(conversation),
      current: () => this._chat.conversation,
      announce,
    });
    const id = Number(sessionStorage.getItem(OPEN));
    const record = id ? await store.get(id).catch(() => null) : null;
    if (record && !this._chat.last) this._show(Conversation.restored(record));
  }

  _listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this._send();
    });
    for (const radio of document.querySelectorAll("[name=kind]")) radio.addEventListener("change", () => this._showKind());
    document.addEventListener("keydown", (event) => this._onKey(event));
    this._text.addEventListener("input", () => this._text.value || this._complain(""));
    byId("stop").addEventListener("click", () => this._running?.abort());
    byId("clear").addEventListener("click", () => this._clear());
    byId("reset").addEventListener("click", () => this._form.reset());
    byId("colours").addEventListener("change", () => this._colour());
    byId("formatted").addEventListener("change", ({ target }) => this._chat.showText(target.checked));
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
    copies(byId("copy"), () => {
      this._showCurl();
      return byId("curl").textContent;
    });
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
    byId("clear").textContent = KINDS[kind].clear;
    byId("keys").textContent = KINDS[kind].keys;
    this._text.placeholder = KINDS[kind].placeholder;
    this._text.classList.toggle("monospace", kind === "completion");
    this._complain("");
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

  /** The request's body, from a completion's text, or from what a chat adds after an exchange. */
  _body(kind, text, asked, before = this._chat.last) {
    const texts = this._form.texts;
    const shown = byId("alternatives").checked ? alternatives(kind, read({ name: "_top", kind: "integer" }, texts._top) ?? 0) : {};
    const set = parameters(kind, texts);
    const template = this._templates.find(({ id }) => id === set.template);
    const filled = template ? templated(template, set.variables, text) : {};
    const sent = template ? asked.filter(({ role }) => role !== "user") : asked;
    const plain = template ? {} : { prompt: text };
    const prompt = kind === "chat" ? { messages: this._chat.conversation.messages(texts._system, before, sent) } : plain;
    const streamed = { stream: true, stream_options: { include_usage: true }, return_token_details: true };
    const body = { model: this._endpoints.chosen?.id ?? "", ...prompt, ...shown, ...set, ...filled, ...streamed };
    if (body.n > 1 && byId("compare").checked) throw new FieldError("n", "Compare shows one answer each: leave this blank.");
    return body;
  }

  async _send() {
    const text = this._text.value;
    if (this._running || text.trim() === "") return;
    if (this._kind === "completion") return this._complete(text);
    this._text.value = "";
    await this._askChat(this._chat.last, text, this._chat.asked(text));
  }

  /** Asks a chat's question after an exchange, or again in another version of what came after it. */
  async _askChat(before, text, asked) {
    if (this._running) return;
    const body = this._checked(() => this._body("chat", text, asked, before));
    if (!body) return void (this._text.value ||= text);
    const way = byId("compare").checked ? this._way(body) : null;
    const view = this._chat.begin(before, { text, asked, model: body.model, way }, body.n ?? 1);
    await this._run(view.shown, "chat", body);
    const { error } = view.shown.chosen.answer;
    const succeeded = view.shown.cards.some(({ answer }) => answer.text || answer.calls.length);
    if (!succeeded) this._text.value ||= text;
    if (!succeeded && isOfText(error)) {
      this._chat.drop(view);
      return this._complain(error.message);
    }
    this._chat.end(view);
    this._finish(view.shown);
  }

  /** Lets the model go on with an answer that ended by its length. */
  async _goOn(view) {
    if (this._running) return;
    const body = this._checked(() => this._body("chat", "", [], view.exchange));
    if (!body) return;
    const whole = { template: undefined, variables: undefined, n: undefined }; // the conversation is there already
    const continues = { model: view.exchange.model, add_generation_prompt: false, continue_final_message: true };
    await this._run(view.shown, "chat", { ...body, ...whole, ...continues });
    this._chat.end(view);
    this._finish(view.shown);
  }

  async _complete(text) {
    const body = this._checked(() => this._body("completion", text, []));
    if (!body) return;
    const options = this._options("completion", text);
    const shown = byId("compare").checked ? new Pair(this._way(body), options) : new Choices(body.model, body.n ?? 1, options);
    this._logs.completion.add(shown.element);
    await this._run(shown, "completion", body);
    const { error } = shown.chosen.answer;
    if (isOfText(error)) {
      shown.element.remove();
      return this._complain(error.message);
    }
    for (const card of shown.cards) card.offer("Go on from here", () => this._propose(text + card.answer.text));
    this._finish(shown);
  }

  /** The body that `build` makes, or null if a field is wrong, which is marked. */
  _checked(build) {
    this._form.clearMark();
    this._complain("");
    try {
      return build();
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      this._openPanel(() => this._form.mark(error.field, error.message));
      return null;
    }
  }

  /** Options of what shows an answer, see Choices and Pair. */
  _options(kind, prompt) {
    const changed = (card) => {
      this._logs[kind].follow();
      if (this._running && card.answer === this._shown?.chosen.answer) this._figures.follow(card.answer);
    };
    const completes = kind === "completion";
    const look = { prompt, monospace: completes, formatted: !completes && byId("formatted").checked, changed };
    return { ...look, proposes: this._endpoints.proposes, whyRests: () => this._whyRests() };
  }

  /** Why drafts rest at the chosen endpoint's target; "" if they don't, or if nobody knows. */
  async _whyRests() {
    try {
      const { replicas } = await this._api.status();
      const { target } = this._endpoints.chosen;
      return replicas.filter(({ model }) => model === target).map(reasonOf).find(Boolean) ?? "";
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      return "";
    }
  }

  /** How to compare a request with and without drafts. */
  _way(body) {
    const verification = body.verification ?? this._endpoints.chosen?.verification ?? "coupled";
    return { race: this._form.texts._race === "race", coupled: verification === "coupled" };
  }

  /** Runs one request, or two to compare them, to the end. */
  async _run(shown, kind, body) {
    this._running = new AbortController();
    this._shown = shown;
    setAsking(true);
    swap(byId("send"), byId("stop"));
    try {
      await shown.run(this._api, PATHS[kind], body, this._running.signal);
    } finally {
      this._running = null;
      setAsking(false);
      swap(byId("stop"), byId("send"));
    }
  }

  _finish({ chosen: { answer } }) {
    this._figures.show(answer);
    for (const log of Object.values(this._logs)) log.follow();
    if (answer.error) this._explain(answer.error);
    else announce(`The answer is complete: ${summary(answer)}`);
  }

  /** Tells at the text field what is wrong with the text; "": nothing. */
  _complain(words) {
    byId("composer-problem").textContent = words;
    byId("composer-problem").hidden = words === "";
    if (words) this._text.focus();
  }

  async _keep(conversation) {
    await this._list.keep(conversation);
    if (conversation === this._chat.conversation && conversation.id) sessionStorage.setItem(OPEN, String(conversation.id));
  }

  /** Shows a conversation. */
  _show(conversation) {
    if (this._running) return;
    this._chat.open(conversation);
    if (conversation.id) sessionStorage.setItem(OPEN, String(conversation.id));
    else sessionStorage.removeItem(OPEN);
    this._list?.update();
    const { element } = this._logs.chat;
    element.scrollTop = element.scrollHeight;
    if (byId("conversations").matches(":popover-open")) byId("conversations").hidePopover();
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
    if (this._kind === "chat") this._show(new Conversation());
    else {
      this._logs.completion.clear();
      this._figures.show(null);
    }
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
      const body = this._body(kind, text, this._chat.asked(text));
      command = curl(new URL(PATHS[kind], document.baseURI).href, body, this._key.value !== "");
    } catch (error) {
      command = error.message;
    }
    byId("curl").textContent = command;
  }
}

/** Whether an error is about what was written, for example its length. */
function isOfText(error) {
  return ["messages", "prompt"].includes((error?.param ?? "").split(/[.[]/)[0]);
}

/** Announces a text to screen readers. */
function announce(words) {
  byId("announcer").textContent = words;
}

/** What changes the conversation waits until the answer is complete. */
function setAsking(asking) {
  byId("clear").disabled = asking;
  for (const element of document.querySelectorAll(".card-actions, .question-row .quiet, #conversations")) element.inert = asking;
}

/** Replaces a button by another, which also gets the keyboard's focus. */
function swap(before, after) {
  const focused = document.activeElement === before;
  before.hidden = true;
  after.hidden = false;
  if (focused) after.focus();
}

new Playground();
