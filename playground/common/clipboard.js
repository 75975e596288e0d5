/** Copies texts to the clipboard, and tells so on the button that did it. */

const SHOWN_MS = 1500;

/** Copies a text; returns false if the browser refuses. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // the clipboard needs TLS or localhost
  }
}

/** Makes a button that copies what `text` returns. */
export function copies(button, text) {
  const label = button.textContent;
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = label), SHOWN_MS);
  });
  return button;
}

function copyBySelection(text) {
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "hidden";
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}
