/** The playground: connects the page's controls with requests and what comes of them. */

import { Api, PATHS } from "./api.js";
import { alternatives, curl, FieldError, parameters, read } from "./body.js";
import { Card } from "./card.js";
import { showChart } from "./chart.js";
import { byId, make } from "./dom.js";
import { Endpoints } from "./endpoints.js";
import { Form } from "./form.js";
import { Conversation, KINDS } from "./kinds.js";
import { Log } from "./log.js";
import { Pair } from "./pair.js";
import { showLegend, showMembers, showStatistics, summary } from "./statistics.js";
import { showSteps } from "./steps.js";
import { Tip } from "./tip.js";

const KEY = "consort.key"; // in the tab's session storage, which no other tab can read
const SEEDS = 2 ** 31;
const BETWEEN_MS = 150; // drawings of the figures

class Playground {
  constructor() {
    this._text = byId("text");
    this._key = byId("key");
    this._key.value = sessionStorage.getItem(KEY) ?? "";
    this._api = new Api(() => this._key.value);
    this._form = new Form(byId("parameters"), sessionStorage);
    this._conversation = new Conversation();
    this._running = null; // what stops the request in progress
    this._endpoints = new Endpoints(this._api, byId("endpoint"), byId("endpoint-facts"), () => this._askForKey());
    const tip = new Tip(byId("tip"), announce);
    this._logs = {};
    for (const kind of Object.keys(KINDS)) {
      this._logs[kind] = new Log(byId(`${kind}-log`), KINDS[kind], (text) => this._propose(text));
      tip.watch(this._logs[kind].element);
    }
    this._listen();
    this._showKind();
    this._show(null);
    this._endpoints.load();
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
    byId("colours").addEventListener("change", ({ target }) => document.body.classList.toggle("colourless", !target.checked));
    byId("panel-toggle").addEventListener("click", ({ target }) => {
      target.setAttribute("aria-expanded", String(document.body.classList.toggle("panel-open")));
    });
    this._key.addEventListener("change", () => {
      sessionStorage.setItem(KEY, this._key.value);
      this._endpoints.load();
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

  /** The body of the request that a text makes. */
  _body(kind, text) {
    const texts = this._form.texts;
    const shown = byId("alternatives").checked ? alternatives(kind, read({ name: "_top", kind: "integer" }, texts._top) ?? 0) : {};
    const prompt = kind === "chat" ? { messages: this._conversation.messages(texts._system, text) } : { prompt: text };
    const streamed = { stream: true, stream_options: { include_usage: true }, return_token_details: true };
    return { model: this._endpoints.chosen?.id ?? "", ...prompt, ...shown, ...parameters(kind, texts), ...streamed };
  }

  async _send() {
    const text = this._text.value;
    if (this._running || text.trim() === "") return;
    if (this._kind === "chat") this._text.value = "";
    await this._ask(this._kind, text);
  }

  async _ask(kind, text) {
    this._form.clearMark();
    let body;
    try {
      body = this._body(kind, text);
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      this._text.value ||= text;
      return this._openPanel(() => this._form.mark(error.field, error.message));
    }
    await this._exchange(kind, text, body);
  }

  /** One request, or two where they are compared, from the first token to the last. */
  async _exchange(kind, text, body) {
    const log = this._logs[kind];
    const changed = ({ answer }) => {
      log.follow();
      if (answer === card.answer && performance.now() - this._shownMs > BETWEEN_MS) this._show(answer);
    };
    const options = { prompt: kind === "chat" ? "" : text, monospace: kind === "completion", changed };
    const comparing = byId("compare").checked;
    const shown = comparing ? new Pair(options) : new Card(body.model, options);
    const card = comparing ? shown.ours : shown;
    const asked = kind === "chat" ? [make("div", { className: "asked", textContent: text })] : [];
    log.add(...asked, shown.element);
    await this._whileRunning((signal) => this._run(shown, kind, body, signal));
    this._finish(kind, text, card, [...asked, shown.element]);
  }

  _run(shown, kind, body, signal) {
    if (shown instanceof Card) return shown.run(this._api, PATHS[kind], body, signal);
    const { verification } = this._endpoints.chosen ?? {};
    const coupled = (body.verification ?? verification ?? "coupled") === "coupled";
    const seeded = { seed: Math.floor(Math.random() * SEEDS), ...body };
    return shown.run(this._api, PATHS[kind], seeded, signal, { race: this._form.texts._race === "race", coupled });
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

  _finish(kind, text, card, elements) {
    const { answer } = card;
    this._show(answer);
    this._logs[kind].follow();
    if (answer.error) this._explain(answer.error);
    else announce(`The answer is complete: ${summary(answer)}`);
    if (kind === "completion") {
      card.offer("Go on from here", () => this._propose(text + answer.text));
      return;
    }
    this._conversation.add(text, answer.text);
    if (!answer.text) this._text.value ||= text;
    this._offerAgain(text, answer, card, elements);
  }

  /** The last exchange can be done over. */
  _offerAgain(text, answer, card, elements) {
    document.querySelectorAll("#chat-log .card-actions").forEach((actions) => actions.replaceChildren());
    card.offer("Again", () => {
      if (this._running) return;
      if (answer.text) this._conversation.undo();
      elements.forEach((element) => element.remove());
      this._ask("chat", text);
    });
  }

  _explain(error) {
    if (error.status === 401) this._askForKey();
    else if (error.param) this._openPanel(() => this._form.mark(error.param, error.message));
  }

  _askForKey() {
    byId("key-details").open = true;
    this._openPanel(() => this._key.focus());
  }

  /** Opens the panel, where it is not beside the text anyway, for what is done there. */
  _openPanel(act) {
    const toggle = byId("panel-toggle");
    if (toggle.offsetParent && toggle.getAttribute("aria-expanded") === "false") toggle.click();
    act();
  }

  _clear() {
    if (this._kind === "chat") this._conversation.clear();
    this._logs[this._kind].clear();
    this._show(null);
    this._text.focus();
  }

  _propose(text) {
    this._text.value = text;
    this._text.focus();
  }

  /** Shows an answer's figures. An answer in progress asks for it often, and drawing takes what a model could use. */
  _show(answer) {
    this._shownMs = performance.now();
    showStatistics(byId("statistics"), answer);
    showLegend(byId("legend"), answer);
    byId("members-section").hidden = !showMembers(byId("members"), answer);
    showChart(byId("chart"), answer?.steps ?? []);
    showSteps(byId("steps"), answer?.steps ?? []);
  }

  _showCurl() {
    let command;
    try {
      const kind = this._kind;
      command = curl(new URL(PATHS[kind], document.baseURI).href, this._body(kind, this._text.value), this._key.value !== "");
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
      getSelection().selectAllChildren(byId("curl")); // only pages with TLS, or of this machine, may copy
    }
  }
}

/** Tells a screen reader. */
function announce(words) {
  byId("announcer").textContent = words;
}

/** Shows one button in place of another, and the keyboard's focus goes along. */
function swap(before, after) {
  const focused = document.activeElement === before;
  before.hidden = true;
  after.hidden = false;
  if (focused) after.focus();
}

new Playground();
