/** A field in the place of a text, to change it. */

import { make } from "../common/dom.js";

const MOST_ROWS = 16;

/**
 * Replaces an element by an editor until it is saved or left.
 * @param {HTMLElement} element  @param {{text: string, label: string, save: string, done: (text: string) => void}} what
 */
export function edit(element, { text, label, save, done }) {
  const back = document.activeElement;
  const rows = Math.min(text.split("\n").length + 1, MOST_ROWS);
  const area = make("textarea", { value: text, rows, "aria-label": label, spellcheck: false });
  const cancel = make("button", { type: "button", className: "quiet", textContent: "Cancel" });
  const submit = make("button", { type: "submit", className: "main quiet", textContent: save });
  const form = make("form", { className: "editor" }, area, make("div", { className: "actions" }, cancel, submit));
  const leave = () => {
    form.replaceWith(element);
    back?.focus();
  };
  cancel.addEventListener("click", leave);
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    if (event.key === "Escape") event.stopPropagation();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    leave();
    if (area.value.trim() !== "") done(area.value);
  });
  element.replaceWith(form);
  area.focus();
}
