/** Writes a conversation as JSON or Markdown. Only `download` knows the page. */

import { make } from "../common/dom.js";

/** @param {import("./conversation.js").Conversation} conversation  @param {string} system the system message */
export function toJson(conversation, system) {
  const path = conversation.path;
  const answers = path.map(({ model, answers, chosen }) => {
    const { seed, finish, speculation, usage, tokens, reasoning } = answers[chosen];
    const written = tokens.map(({ text, source, proposer }) => ({ text, source, ...(proposer && { proposer }) }));
    return { model, finish_reason: finish, seed, reasoning, speculation, usage, tokens: written };
  });
  const messages = conversation.messages(system, path.at(-1) ?? null, []);
  const created = new Date(conversation.createdMs).toISOString();
  return JSON.stringify({ title: conversation.title, created, messages, answers }, null, 2);
}

export function toMarkdown(conversation, system) {
  const first = system.trim() ? [`**System**\n\n${system}`] : [];
  const exchanges = conversation.path.flatMap(({ text, model, answers, chosen }) => {
    const { text: answer, calls } = answers[chosen];
    const called = calls.map(({ name, arguments: given }) => `Calls \`${name}\`:\n\n\`\`\`json\n${given}\n\`\`\``);
    return [text && `**You**\n\n${text}`, [`**${model}**`, answer, ...called].filter(Boolean).join("\n\n")].filter(Boolean);
  });
  return [`# ${conversation.title}`, ...first, ...exchanges].join("\n\n") + "\n";
}

/** Saves a text as a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}
