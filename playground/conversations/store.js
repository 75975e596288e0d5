/** Keeps conversations in the browser's database. */

const NAME = "consort";
const TABLE = "conversations";

export class Store {
  constructor() {
    this._opened = null; // a promise of the database
  }

  /** Writes a conversation, and gives it an id if it has none. */
  async put(conversation) {
    conversation.id = await this._run("readwrite", (table) => table.put(conversation.record));
  }

  /** A conversation's record; undefined if it is gone. */
  async get(id) {
    return this._run("readonly", (table) => table.get(id));
  }

  /** All records, the latest first. */
  async all() {
    const records = await this._run("readonly", (table) => table.getAll());
    return records.sort((left, right) => right.changedMs - left.changedMs);
  }

  async delete(id) {
    await this._run("readwrite", (table) => table.delete(id));
  }

  async clear() {
    await this._run("readwrite", (table) => table.clear());
  }

  async _run(mode, ask) {
    this._opened ??= open();
    const database = await this._opened;
    return answered(ask(database.transaction(TABLE, mode).objectStore(TABLE)));
  }
}

function open() {
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id", autoIncrement: true });
  return answered(request);
}

function answered(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
