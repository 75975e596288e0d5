/** Creates elements. Text is never parsed as markup. */

/**
 * @param {string} tag
 * @param {Record<string, unknown>} [properties] of the element; names with a dash, and role, are attributes
 * @param {(Node|string)[]} children
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** @returns {HTMLElement} */
export function byId(id) {
  return document.getElementById(id);
}

/** Creates an SVG element, where everything is an attribute. */
export function draw(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
