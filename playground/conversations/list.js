/** The conversations that the browser keeps: its database, and their list on the page. */

import { button, facts, make } from "../dom.js";
import { Conversation } from "./conversation.js";

const DATABASE = "consort";
const TABLE = "conversations";
const MOST_SHOWN = 200;

export class ConversationList {
  /** acts: `open(conversation)`, `current()`, `announce(words)`. */
  constructor(element, acts) {
    this._acts = acts;
    this._items = make("ul", { className: "conversations" });
    const title = make("h2", { textContent: "Conversations" });
    const deleteAll = button("Delete all", () => this._deleteAll());
    element.append(title, facts("Kept in this browser only.", "p"), this._items, deleteAll);
    this.update();
  }

  /** Keeps a conversation, gives it an id if it has none, and shows it in the list. */
  async keep(conversation) {
    try {
      conversation.id = await ask("readwrite", (table) => table.put(conversation.record));
    } catch (error) {
      return this._acts.announce(`The browser does not keep this conversation: ${error.message}`);
    }
    await this.update();
  }

  /** Shows what is kept, the latest first. */
  async update() {
    const records = await ask("readonly", (table) => table.getAll()).catch(() => []); // `keep` says if nothing can be kept
    records.sort((left, right) => right.changedMs - left.changedMs);
    const items = records.slice(0, MOST_SHOWN).map((record) => this._item(record));
    this._items.replaceChildren(...(items.length ? items : [facts("None yet.", "li")]));
  }

  _item(record) {
    const { id, title, changedMs } = record;
    const date = new Date(changedMs).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" });
    const open = button("", () => this._acts.open(Conversation.restored(record)), { className: "conversation" });
    open.append(make("span", { textContent: title }), facts(date));
    if (id === this._acts.current().id) open.setAttribute("aria-current", "true");
    return make("li", {}, open, button("×", () => this._delete(id), { "aria-label": `Delete: ${title}` }));
  }

  async _delete(id) {
    await ask("readwrite", (table) => table.delete(id));
    if (id === this._acts.current().id) this._acts.open(new Conversation());
    await this.update();
    this._acts.announce("Deleted.");
  }

  async _deleteAll() {
    if (!confirm("Delete all conversations that this browser keeps?")) return;
    await ask("readwrite", (table) => table.clear());
    this._acts.open(new Conversation());
    await this.update();
  }
}

/** A conversation that the browser keeps; null if it is gone. */
export async function kept(id) {
  const record = await ask("readonly", (table) => table.get(id)).catch(() => null);
  return record ? Conversation.restored(record) : null;
}

let opened = null; // a promise of the database

async function ask(mode, question) {
  opened ??= open();
  const transaction = (await opened).transaction(TABLE, mode);
  return answered(question(transaction.objectStore(TABLE)));
}

function open() {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id", autoIncrement: true });
  return answered(request);
}

function answered(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
