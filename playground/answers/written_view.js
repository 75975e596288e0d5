/** An answer's tokens as the model wrote them. Fast tokens are added, not drawn anew. */

import { spanOf, tokenOf } from "./tokens.js";

export class WrittenView {
  /** @param {HTMLElement} element */
  constructor(element) {
    this._element = element;
    this._spans = [];
    element.replaceChildren();
  }

  /** @param {import("./answer.js").Token[]} tokens all so far */
  draw(tokens) {
    const added = tokens.slice(this._spans.length).map((token) => spanOf(token));
    this._spans.push(...added);
    this._element.append(...added);
  }

  /** Draws tokens whose text was cut when the answer ended. */
  settle(tokens) {
    this.draw(tokens);
    for (const span of this._spans) {
      const { text } = tokenOf(span);
      if (span.textContent !== text) span.textContent = text;
    }
  }
}
