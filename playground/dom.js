/** Creates elements. Text is never parsed as markup. */

const COPIED_MS = 1500; // how long a button tells that it copied

/** properties: of the element; names with a dash, and role, are attributes. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** Creates an SVG element, where everything is an attribute. */
export function draw(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A small button. */
export function button(textContent, act, properties = {}) {
  const made = make("button", { type: "button", className: "quiet", textContent, ...properties });
  made.addEventListener("click", act);
  return made;
}

/** Secondary words. */
export function facts(words, tag = "span") {
  return make(tag, { className: "facts", textContent: words });
}

export function byId(id) {
  return document.getElementById(id);
}

/** Lets a button copy what `text` returns, and tell whether it did. */
export function copies(button, text) {
  const label = button.textContent;
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = label), COPIED_MS);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // the clipboard needs TLS or localhost
  }
}

function copyBySelection(text) {
  const area = make("textarea", { value: text, className: "hidden" });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}
