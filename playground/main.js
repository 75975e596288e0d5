/** The playground: connects the page's controls with requests and answers. */

import { Choices } from "./answers/choices.js";
import { Pair } from "./answers/pair.js";
import { Tip } from "./answers/tip.js";
import { Chat, Log } from "./conversations/chat.js";
import { Conversation } from "./conversations/conversation.js";
import { ConversationList, kept } from "./conversations/list.js";
import { button, byId, copies, make } from "./dom.js";
import { Replicas } from "./figures/replicas.js";
import { reasonOf } from "./figures/speculation.js";
import { Figures, summary } from "./figures/statistics.js";
import { Api, PATHS } from "./request/api.js";
import { alternatives, curl, FieldError, parameters, read, templated } from "./request/body.js";
import { Endpoints } from "./request/endpoints.js";
import { KINDS } from "./request/fields.js";
import { Form } from "./request/form.js";

// In the tab's session storage, which no other tab can read:
const KEY = "consort.key";
const OPEN = "consort.conversation";

class Playground {
  constructor() {
    this._text = byId("text");
    this._key = byId("key");
    this._key.value = sessionStorage.getItem(KEY) ?? "";
    this._api = new Api(() => this._key.value);
    this._form = new Form(byId("parameters"));
    this._running = null; // AbortController of the request in progress
    this._templates = [];
    this._figures = new Figures();
    new Replicas(byId("replicas-details"), byId("replicas"), this._api);
    this._endpoints = new Endpoints(this._api, byId("endpoint"), byId("endpoint-facts"), {
      changed: () => this._suitColours(),
      unauthorized: () => this._askForKey(),
    });
    const tip = new Tip(byId("tip"), announce);
    const logOf = (kind) => new Log(byId(`${kind}-log`), () => this._welcome(KINDS[kind]));
    this._logs = { chat: logOf("chat"), completion: logOf("completion") };
    for (const { element } of Object.values(this._logs)) tip.watch(element);
    this._openChat();
    this._listen();
    this._showKind();
    this._load();
  }

  get _kind() {
    return document.querySelector("[name=kind]:checked").value;
  }

  /** Shows the conversation that the tab had before a reload, or a new one. */
  async _openChat() {
    this._chat = new Chat(this._logs.chat, {
      options: () => this._options("chat", ""),
      ask: (before, text, asked) => this._askChat(before, text, asked),
      goOn: (view) => this._goOn(view),
      shown: (view) => this._figures.show(view?.shown.chosen.answer ?? null),
      changed: (conversation) => this._keep(conversation),
    });
    this._list = new ConversationList(byId("conversations"), {
      open: (conversation) => this._show(conversation),
      current: () => this._chat.conversation,
      announce,
    });
    const id = Number(sessionStorage.getItem(OPEN));
    const conversation = id ? await kept(id) : null;
    if (conversation && !this._chat.last) this._show(conversation);
  }

  _listen() {
    const on = (id, type, act) => byId(id).addEventListener(type, act);
    on("composer", "submit", (event) => {
      event.preventDefault();
      this._send();
    });
    for (const radio of document.querySelectorAll("[name=kind]")) radio.addEventListener("change", () => this._showKind());
    document.addEventListener("keydown", (event) => this._onKey(event));
    on("text", "input", () => this._text.value || this._complain(""));
    on("stop", "click", () => this._running?.abort());
    on("clear", "click", () => this._clear());
    on("reset", "click", () => this._form.reset());
    on("colours", "change", () => this._colour());
    on("formatted", "change", ({ target }) => this._chat.showText(target.checked));
    on("panel-toggle", "click", ({ target }) => {
      target.setAttribute("aria-expanded", String(document.body.classList.toggle("panel-open")));
    });
    on("key", "change", () => {
      sessionStorage.setItem(KEY, this._key.value);
      this._load();
    });
    on("key-form", "submit", (event) => event.preventDefault());
    on("curl-details", "toggle", () => this._showCurl());
    copies(byId("copy"), () => this._showCurl());
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
    const { label, send, clear, keys, placeholder } = KINDS[kind];
    const words = { "text-label": label, send, clear, keys };
    for (const [id, text] of Object.entries(words)) byId(id).textContent = text;
    this._text.placeholder = placeholder;
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

  /** Loads what the server offers. The picker of endpoints tells what is wrong if there is no answer. */
  async _load() {
    this._endpoints.load();
    this._templates = (await this._api.get("v1/templates").catch(() => ({ data: [] }))).data;
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
    if (!view.shown.cards.some(({ answer }) => answer.text || answer.calls.length)) {
      this._text.value ||= text;
      if (this._refuses(view.shown)) return this._chat.drop(view);
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
    const compares = byId("compare").checked;
    const shown = compares ? new Pair(this._way(body), options) : new Choices(body.model, body.n ?? 1, options);
    this._logs.completion.add(shown.element);
    await this._run(shown, "completion", body);
    if (this._refuses(shown)) return shown.element.remove();
    for (const card of shown.cards) card.offer("Go on from here", () => this._propose(text + card.answer.text));
    this._finish(shown);
  }

  /** Whether the server refused what was written, for example its length, which is told where it is written. */
  _refuses({ chosen: { answer } }) {
    const refused = /^(messages|prompt)\b/.test(answer.error?.param ?? "");
    if (refused) this._complain(answer.error.message);
    return refused;
  }

  /** The body that `build` makes, or null if a field is wrong, which is marked. */
  _checked(build) {
    this._form.clearMark();
    this._complain("");
    try {
      return build();
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      this._mark(error.field, error.message);
      return null;
    }
  }

  /** Options of what shows an answer, see Choices and Pair. */
  _options(kind, prompt) {
    const completes = kind === "completion";
    return {
      prompt,
      monospace: completes,
      formatted: !completes && byId("formatted").checked,
      proposes: this._endpoints.proposes,
      whyRests: () => this._whyRests(),
      changed: (card) => {
        this._logs[kind].follow();
        if (this._running && card.answer === this._shown?.chosen.answer) this._figures.follow(card.answer);
      },
    };
  }

  /** Why drafts rest at the chosen endpoint's target; "" if they don't, or if nobody knows. */
  async _whyRests() {
    const { replicas } = await this._api.get("v1/status").catch(() => ({ replicas: [] }));
    const { target } = this._endpoints.chosen;
    return replicas.filter(({ model }) => model === target).map(reasonOf).find(Boolean) ?? "";
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
    try {
      await shown.run(this._api, PATHS[kind], body, this._running.signal);
    } finally {
      this._running = null;
      setAsking(false);
    }
  }

  _finish({ chosen: { answer } }) {
    this._figures.show(answer);
    for (const log of Object.values(this._logs)) log.follow();
    const { error } = answer;
    if (!error) announce(`The answer is complete: ${summary(answer)}`);
    else if (error.status === 401) this._askForKey();
    else if (error.param) this._mark(error.param, error.message);
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
    sessionStorage.setItem(OPEN, String(conversation.id ?? ""));
    this._list?.update();
    this._logs.chat.toEnd();
    if (byId("conversations").matches(":popover-open")) byId("conversations").hidePopover();
  }

  _askForKey() {
    byId("key-details").open = true;
    this._openPanel();
    this._key.focus();
  }

  _mark(field, message) {
    this._openPanel();
    this._form.mark(field, message);
  }

  /** Opens the panel if the screen is so narrow that it is closed. */
  _openPanel() {
    const toggle = byId("panel-toggle");
    if (toggle.offsetParent && toggle.getAttribute("aria-expanded") === "false") toggle.click();
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

  /** What a log shows while it is empty. */
  _welcome({ title, examples }) {
    const buttons = examples.map((text) => button(text, () => this._propose(text), { className: "example" }));
    const words = "The drafter proposes, the target decides. Colours show who wrote what.";
    const choices = make("div", { className: "examples row" }, ...buttons);
    return make("div", { className: "welcome" }, make("h2", { textContent: title }), make("p", { textContent: words }), choices);
  }

  /** Shows the request as a command, or what is wrong with it, and returns that. */
  _showCurl() {
    const [kind, text, shown] = [this._kind, this._text.value, byId("curl")];
    try {
      const body = this._body(kind, text, this._chat.asked(text));
      shown.textContent = curl(new URL(PATHS[kind], document.baseURI).href, body, this._key.value !== "");
    } catch (error) {
      shown.textContent = error.message;
    }
    return shown.textContent;
  }
}

/** Announces a text to screen readers. */
function announce(words) {
  byId("announcer").textContent = words;
}

/** While an answer is written, Stop is in the place of Send, and what changes the conversation waits. */
function setAsking(asking) {
  const [before, after] = asking ? [byId("send"), byId("stop")] : [byId("stop"), byId("send")];
  const focused = document.activeElement === before;
  before.hidden = true;
  after.hidden = false;
  if (focused) after.focus();
  byId("clear").disabled = asking;
  for (const element of document.querySelectorAll(".card .actions, .question-row .quiet, #conversations")) element.inert = asking;
}

new Playground();
