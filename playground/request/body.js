/** Builds a request's body from the page's controls. Pure. */

import { FIELDS } from "./fields.js";

const COMPLETION_TOKENS = 256; // the API's own default is 16

/** A wrong value in a control. name: of the field. */
export class FieldError extends Error {
  constructor(name, message) {
    super(message);
    this.field = name;
  }
}

/**
 * The request's parameters, without prompt and model.
 * @param {Record<string, string>} texts the value of each field's control; switches: "true" or "false"
 * @throws {FieldError}
 */
export function parameters(kind, texts) {
  const fields = FIELDS.filter(({ name, only }) => !name.startsWith("_") && (!only || only === kind));
  const set = fields.map((field) => [field.name, read(field, texts[field.name] ?? "")]);
  return {
    ...(kind === "completion" && { max_tokens: COMPLETION_TOKENS }),
    ...Object.fromEntries(set.filter(([, value]) => value !== undefined)),
    ...structure(texts._structure, texts._definition ?? ""),
    ...read({ name: "_more", kind: "json" }, texts._more ?? ""),
  };
}

/** The fields that ask for log-probabilities, with this many alternatives per position. */
export function alternatives(kind, count) {
  return kind === "chat" ? { logprobs: true, top_logprobs: count } : { logprobs: count };
}

/** The fields that send a text through a template: as its first variable that is not set. */
export function templated({ id, variables: names }, variables = {}, text) {
  const free = names.find((name) => name !== "examples" && !(name in variables));
  if (free === undefined) throw new FieldError("variables", "All variables of the template are set; leave one for the text.");
  return { template: id, variables: { ...variables, [free]: text } };
}

/** The value of a field, or undefined if it is not set. */
export function read({ name, kind, value: standard }, text) {
  if (kind === "switch") return text === (standard ?? "false") ? undefined : text === "true";
  if (text.trim() === "") return undefined;
  if (kind === "lines") return lines(text).map((line) => line.replaceAll("\\n", "\n"));
  if (kind === "json" || kind === "list") return json(name, text, kind === "list");
  if (kind !== "number" && kind !== "integer") return text;
  const value = Number(text);
  if (!Number.isFinite(value) || (kind === "integer" && !Number.isSafeInteger(value)))
    throw new FieldError(name, `${text} should be ${kind === "integer" ? "a whole number" : "a number"}.`);
  return value;
}

function lines(text) {
  return text.split("\n").filter((line) => line !== "");
}

function json(name, text, list = false) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new FieldError(name, `This is not JSON: ${error.message}`);
  }
  if (value === null || typeof value !== "object" || Array.isArray(value) !== list)
    throw new FieldError(name, `This should be a JSON ${list ? "array: […]" : "object: {…}"}`);
  return value;
}

function structure(kind, definition) {
  if (!kind) return {};
  if (kind === "json_object") return { response_format: { type: kind } };
  if (!definition.trim()) throw new FieldError("_definition", "What the answer must be is not defined.");
  if (kind === "json") return { structured_outputs: { json: json("_definition", definition) } };
  return { structured_outputs: { [kind]: kind === "choice" ? lines(definition) : definition } };
}

/** The request as a shell command, without the key. */
export function curl(url, body, hasKey) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = hasKey ? ["  -H \"Authorization: Bearer $CONSORT_API_KEY\""] : [];
  return [`curl -N ${url}`, "  -H 'Content-Type: application/json'", ...key, `  -d '${quoted}'`].join(" \\\n");
}
