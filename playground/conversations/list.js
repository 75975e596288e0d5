/** The list of conversations that the browser keeps, and what can be done with them. */

import { make } from "../common/dom.js";
import { Conversation } from "./conversation.js";

const MOST_SHOWN = 200;

export class ConversationList {
  /**
   * @param {HTMLElement} element  @param {import("./store.js").Store} store
   * @param {object} acts
   * @param {(conversation: Conversation) => void} acts.open
   * @param {() => Conversation} acts.current
   * @param {(words: string) => void} acts.announce
   */
  constructor(element, store, acts) {
    Object.assign(this, { _store: store, _acts: acts });
    this._items = make("ul", { className: "conversations" });
    const all = make("button", { type: "button", className: "quiet", textContent: "Delete all" });
    all.addEventListener("click", () => this._deleteAll());
    element.append(
      make("h2", { textContent: "Conversations" }),
      make("p", { className: "facts", textContent: "Kept in this browser only." }),
      this._items,
      all,
    );
    this.update();
  }

  /** Keeps a conversation, and shows it in the list. */
  async keep(conversation) {
    try {
      await this._store.put(conversation);
    } catch (error) {
      return this._acts.announce(`The browser does not keep this conversation: ${error.message}`);
    }
    await this.update();
  }

  /** Shows what is kept. */
  async update() {
    let records = [];
    try {
      records = await this._store.all();
    } catch {
      // A browser that keeps nothing; `keep` says so.
    }
    const items = records.slice(0, MOST_SHOWN).map((record) => this._item(record));
    const none = make("li", { className: "facts", textContent: "None yet." });
    this._items.replaceChildren(...(items.length ? items : [none]));
  }

  _item(record) {
    const date = new Date(record.changedMs).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" });
    const words = [make("span", { textContent: record.title }), make("span", { className: "facts", textContent: date })];
    const open = make("button", { type: "button", className: "conversation" }, ...words);
    if (record.id === this._acts.current().id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => this._acts.open(Conversation.restored(record)));
    const remove = make("button", { type: "button", className: "quiet", textContent: "×", "aria-label": `Delete: ${record.title}` });
    remove.addEventListener("click", () => this._delete(record));
    return make("li", {}, open, remove);
  }

  async _delete({ id }) {
    await this._store.delete(id);
    if (id === this._acts.current().id) this._acts.open(new Conversation());
    await this.update();
    this._acts.announce("Deleted.");
  }

  async _deleteAll() {
    if (!confirm("Delete all conversations that this browser keeps?")) return;
    await this._store.clear();
    this._acts.open(new Conversation());
    await this.update();
  }
}
