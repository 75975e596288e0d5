/** The form of parameters: a control for each field, with help and errors. */

import { button, make } from "../dom.js";
import { FIELDS, GROUPS } from "./fields.js";

const STORE = "consort.parameters"; // in the tab's session storage, so that values outlive a reload
const PARTS = { response_format: "_structure", structured_outputs: "_definition" };

export class Form {
  constructor(element) {
    this._controls = new Map();
    this._rows = new Map();
    this._groups = new Map(GROUPS.map((group) => [this._group(group), group]));
    element.append(...this._groups.keys());
    element.addEventListener("submit", (event) => event.preventDefault());
    element.addEventListener("input", () => this._keep());
    element.addEventListener("keydown", showHelp);
    const kept = Object.entries(this._kept).filter(([name]) => this._controls.has(name));
    for (const [name, text] of kept) setText(this._controls.get(name), text);
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

  /** Marks a wrong field, if it is on this form. param: a field's name, or a path that begins with one */
  mark(param, message) {
    const [root] = param.split(/[.[]/);
    const control = this._controls.get(param) ?? this._controls.get(PARTS[root] ?? root);
    if (!control) return;
    const row = control.closest(".field");
    row.closest("details").open = true;
    control.setAttribute("aria-invalid", "true");
    row.append(make("p", { className: "wrong", textContent: message }));
    control.focus();
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
    const kept = control.value || this._kept[name] || "";
    control.replaceChildren(...choices.map(([value, label]) => new Option(label, value)));
    control.value = choices.some(([value]) => value === kept) ? kept : "";
  }

  _keep() {
    sessionStorage.setItem(STORE, JSON.stringify(this.texts));
  }

  get _kept() {
    return JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
  }
}

/** A button for the pointer; the keyboard has F1 in the field, and screen readers have the description. */
function questionMark({ label }, help) {
  const toggle = () => {
    help.hidden = !help.hidden;
    mark.setAttribute("aria-expanded", String(!help.hidden));
  };
  const state = { "aria-label": `Help: ${label}`, "aria-expanded": "false", "aria-controls": help.id };
  const mark = button("?", toggle, { tabIndex: -1, className: "question", ...state });
  return mark;
}

/** F1 in a field shows its help, or hides it. */
function showHelp(event) {
  const row = event.key === "F1" && event.target.closest(".field");
  if (!row) return;
  event.preventDefault();
  row.querySelector(".question").click();
}

function controlOf({ kind, choices, value = "", blank = "", min = "", max = "", step = 1 }, id) {
  const common = { id, "aria-describedby": `${id}-help` };
  switch (kind) {
    case "choice":
      return make("select", common, ...choices.map(([value, label]) => new Option(label, value)));
    case "switch":
      return make("input", { ...common, type: "checkbox", role: "switch", checked: value === "true" });
    case "number":
    case "integer":
      return make("input", { ...common, type: "number", min, max, step, value, placeholder: blank, autocomplete: "off" });
    default:
      return make("textarea", { ...common, value, placeholder: blank, rows: kind === "list" ? 5 : 2, spellcheck: false });
  }
}

function textOf(control) {
  if (control.type === "checkbox") return String(control.checked);
  return control.validity?.badInput ? "not a number" : control.value;
}

function setText(control, text) {
  if (control.type === "checkbox") control.checked = text === "true";
  else control.value = text;
}
