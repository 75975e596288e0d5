/** Parses server-sent events from a byte stream. Must not know their meaning. */

/**
 * @param {ReadableStream<Uint8Array>} stream
 * @yields {{name: string, data: string, id: string?}} one event; its name is "message" if it has none
 */
export async function* events(stream) {
  let rest = "";
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      yield* blocks.map(parsed);
    }
  } finally {
    reader.cancel().catch(() => {}); // already closed by an abort
  }
}

function parsed(block) {
  const event = { name: "message", data: "", id: null };
  for (const line of block.split(/\r?\n/)) {
    const [, field, value] = /^(\w*): ?(.*)$/s.exec(line) ?? [];
    if (field === "event") event.name = value;
    if (field === "id") event.id = value;
    if (field === "data") event.data += event.data ? `\n${value}` : value;
  }
  return event;
}
