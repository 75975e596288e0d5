/** A list of exchanges that scrolls to the end, unless the reader has scrolled away. */

import { make } from "../common/dom.js";

const NEAR_PX = 80;

export class Log {
  /** @param {HTMLElement} element  @param {{title: string, words: string, examples: string[]}} welcome shown while empty
   *  @param {(text: string) => void} chosen called with an example that was chosen */
  constructor(element, welcome, chosen) {
    this.element = element;
    this._welcome = () => welcomeOf(welcome, chosen);
    this.clear();
  }

  clear() {
    this.element.replaceChildren(this._welcome());
  }

  add(...elements) {
    this.element.querySelector(".welcome")?.remove();
    this.element.append(...elements);
    this.element.scrollTop = this.element.scrollHeight;
  }

  /** Shows these elements only. Those that stay are not touched. */
  show(elements) {
    if (!elements.length) return this.clear();
    for (const child of [...this.element.children]) if (!elements.includes(child)) child.remove();
    this.add(...elements.slice(this.element.children.length));
  }

  /** Scrolls to new text, if the reader is near the end. */
  follow() {
    const { scrollTop, scrollHeight, clientHeight } = this.element;
    if (scrollHeight - scrollTop - clientHeight < NEAR_PX + clientHeight / 4) this.element.scrollTop = scrollHeight;
  }
}

function welcomeOf({ title, words, examples }, chosen) {
  const buttons = examples.map((text) => {
    const button = make("button", { type: "button", className: "example", textContent: text });
    button.addEventListener("click", () => chosen(text));
    return button;
  });
  const choices = make("div", { className: "examples" }, ...buttons);
  return make("div", { className: "welcome" }, make("h2", { textContent: title }), make("p", { textContent: words }), choices);
}
