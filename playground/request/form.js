/** The form of parameters: a control for each field, with help and errors. */

import { make } from "../common/dom.js";
import { FIELDS, GROUPS } from "./fields.js";

const STORE = "consort.parameters";
const PARTS = { response_format: "_structure", structured_outputs: "_definition" };

export class Form {
  /** @param {HTMLFormElement} element  @param {Storage} storage keeps the values across reloads of the tab */
  constructor(element, storage) {
    this._storage = storage;
    this._controls = new Map();
    this._rows = new Map();
    this._groups = new Map(GROUPS.map((group) => [this._group(group), group]));
    element.append(...this._groups.keys());
    element.addEventListener("submit", (event) => event.preventDefault());
    element.addEventListener("input", () => this._keep());
    element.addEventListener("keydown", (event) => help(event));
    this._restore();
  }

  /** The value of each control. */
  get texts() {
    return Object.fromEntries([...this._controls].map(([name, control]) => [name, textOf(control)]));
  }

  /** Shows the fields of one kind of request. */
  showFor(kind) {
    for (const { name, only } of FIELDS) this._rows.get(name).hidden = only !== undefined && only !== kind;
    for (const [group, { only }] of this._groups) group.hidden = only !== undefined && only !== kind;
  }

  /** Sets all fields to their defaults. */
  reset() {
    this.clearMark();
    for (const { name, value = "" } of FIELDS) setText(this._controls.get(name), value);
    this._keep();
  }

  /** Marks a wrong field; returns false if it is not on this form. */
  mark(param, message) {
    const root = (param ?? "").split(/[.[]/)[0];
    const control = this._controls.get(param) ?? this._controls.get(PARTS[root] ?? root);
    if (!control) return false;
    const row = control.closest(".field");
    row.closest("details").open = true;
    control.setAttribute("aria-invalid", "true");
    row.append(make("p", { className: "wrong", textContent: message }));
    control.focus();
    return true;
  }

  clearMark() {
    for (const row of this._rows.values()) {
      row.querySelector("[aria-invalid]")?.removeAttribute("aria-invalid");
      row.querySelector(".wrong")?.remove();
    }
  }

  _group({ title, open = false, fields }) {
    const rows = fields.map((field) => this._row(field));
    return make("details", { open, className: "group" }, make("summary", { textContent: title }), ...rows);
  }

  _row(field) {
    const id = `field-${field.name}`;
    const control = controlOf(field, id);
    const help = make("p", { id: `${id}-help`, className: "help", textContent: field.help, hidden: true });
    const label = make("label", { htmlFor: id, textContent: field.label });
    const row = make("div", { className: `field ${field.kind}` }, label, questionMark(field, help), control, help);
    this._controls.set(field.name, control);
    this._rows.set(field.name, row);
    return row;
  }

  /** Replaces the choices of a field, and keeps its value. */
  offer(name, choices) {
    const control = this._controls.get(name);
    const kept = control.value || JSON.parse(this._storage.getItem(STORE) ?? "{}")[name] || "";
    control.replaceChildren(...choices.map(([value, label]) => new Option(label, value)));
    control.value = choices.some(([value]) => value === kept) ? kept : "";
  }

  _keep() {
    this._storage.setItem(STORE, JSON.stringify(this.texts));
  }

  _restore() {
    const kept = JSON.parse(this._storage.getItem(STORE) ?? "{}");
    for (const [name, text] of Object.entries(kept)) if (this._controls.has(name)) setText(this._controls.get(name), text);
  }
}

/** A button for the pointer; the keyboard has F1 in the field, and screen readers have the description. */
function questionMark({ label }, help) {
  const button = make("button", {
    type: "button",
    tabIndex: -1,
    className: "question",
    textContent: "?",
    "aria-label": `Help: ${label}`,
    "aria-expanded": "false",
    "aria-controls": help.id,
  });
  button.addEventListener("click", () => {
    help.hidden = !help.hidden;
    button.setAttribute("aria-expanded", String(!help.hidden));
  });
  return button;
}

/** F1 in a field shows its help, or hides it. */
function help(event) {
  const row = event.key === "F1" && event.target.closest(".field");
  if (!row) return;
  event.preventDefault();
  row.querySelector(".question").click();
}

function controlOf(field, id) {
  const common = { id, "aria-describedby": `${id}-help` };
  switch (field.kind) {
    case "choice":
      return make("select", common, ...field.choices.map(([value, label]) => new Option(label, value)));
    case "switch":
      return make("input", { ...common, type: "checkbox", role: "switch", checked: field.value === "true" });
    case "number":
    case "integer":
      return numberInput(field, common);
    default:
      return make("textarea", { ...common, ...areaOf(field), spellcheck: false, value: field.value ?? "" });
  }
}

function areaOf({ kind, blank = "" }) {
  return { rows: kind === "list" ? 5 : 2, placeholder: blank };
}

function numberInput({ min, max, step = 1, value = "", blank = "" }, common) {
  const limits = Object.entries({ min, max }).filter(([, limit]) => limit !== undefined);
  const properties = { ...common, type: "number", placeholder: blank, autocomplete: "off", ...Object.fromEntries(limits) };
  return make("input", { ...properties, step: String(step), value });
}

function textOf(control) {
  if (control.type === "checkbox") return String(control.checked);
  return control.validity?.badInput ? "not a number" : control.value;
}

function setText(control, text) {
  if (control.type === "checkbox") control.checked = text === "true";
  else control.value = text;
}
