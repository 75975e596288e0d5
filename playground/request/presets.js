/** Named presets: system message and parameters, kept in the browser. */

import { make } from "../common/dom.js";

const STORE = "consort.presets";

export class Presets {
  /**
   * @param {HTMLElement} element  @param {Storage} storage
   * @param {import("./form.js").Form} form  @param {(words: string) => void} announce
   */
  constructor(element, storage, form, announce) {
    Object.assign(this, { _storage: storage, _form: form, _announce: announce });
    this._picker = make("select", { id: "preset" });
    this._name = make("input", { id: "preset-name", placeholder: "Name", "aria-label": "Name of the preset", autocomplete: "off" });
    const save = make("button", { type: "submit", className: "quiet", textContent: "Save" });
    this._remove = make("button", { type: "button", className: "quiet", textContent: "Delete" });
    const saving = make("form", { className: "preset-row" }, this._name, save, this._remove);
    element.append(make("label", { htmlFor: "preset", textContent: "Preset" }), this._picker, saving);
    this._picker.addEventListener("change", () => this._apply());
    this._remove.addEventListener("click", () => this._delete());
    saving.addEventListener("submit", (event) => {
      event.preventDefault();
      this._save(this._name.value.trim());
    });
    this._show("");
  }

  /** The texts of all fields, by preset. @returns {Record<string, Record<string, string>>} */
  get _kept() {
    return JSON.parse(this._storage.getItem(STORE) ?? "{}");
  }

  _show(chosen) {
    const names = Object.keys(this._kept).sort();
    this._picker.replaceChildren(new Option("none", ""), ...names.map((name) => new Option(name, name)));
    this._picker.value = this._name.value = chosen;
    this._remove.disabled = chosen === "";
  }

  _apply() {
    const name = this._picker.value;
    this._form.fill(this._kept[name] ?? {});
    this._show(name);
  }

  _save(name) {
    if (!name) return this._name.focus();
    this._storage.setItem(STORE, JSON.stringify({ ...this._kept, [name]: this._form.texts }));
    this._show(name);
    this._announce(`Preset ${name} is saved.`);
  }

  _delete() {
    const { [this._picker.value]: _, ...others } = this._kept;
    this._storage.setItem(STORE, JSON.stringify(others));
    this._show("");
    this._picker.focus();
  }
}
