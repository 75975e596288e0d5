// OpenAI's and Anthropic's clients, the AI SDK and LangChain in JavaScript, against the default model.
// CONSORT_DEFAULT_URL is the server's base URL, without /v1.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { ChatOpenAI } from "@langchain/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const URL = process.env.CONSORT_DEFAULT_URL;
const NAME = "smollm2";
const QUESTION = "What is the weather in Bern?";
const ASK = [{ role: "user", content: QUESTION }];
// Bounds keep a small model from writing on.
const Weather = z.object({ city: z.string().max(24), unit: z.enum(["C", "F"]) });
const City = z.object({ name: z.string().max(20), people: z.int().min(0).max(9999999), size: z.enum(["small", "large"]) });
const clients = { apiKey: "none", maxRetries: 0 };

test("openai: a call is forced, streamed, and answered", async () => {
  const client = new OpenAI({ baseURL: `${URL}/v1`, ...clients });
  const tools = [zodFunction({ name: "weather", parameters: Weather })];
  const options = { model: NAME, tools, tool_choice: "required", max_completion_tokens: 200 };
  const first = (await client.chat.completions.parse({ ...options, messages: ASK })).choices[0];
  Weather.parse(first.message.tool_calls[0].function.parsed_arguments);
  const streamed = await client.chat.completions.stream({ ...options, messages: ASK }).finalChatCompletion();
  Weather.parse(JSON.parse(streamed.choices[0].message.tool_calls[0].function.arguments));
  const results = first.message.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: "sunny" }));
  const messages = [...ASK, first.message, ...results];
  await client.chat.completions.create({ ...options, messages, tool_choice: "auto", max_completion_tokens: 32 });
  const format = zodResponseFormat(City, "city");
  const parsed = await client.chat.completions.parse({ model: NAME, messages: ASK, response_format: format });
  City.parse(parsed.choices[0].message.parsed);
});

test("openai: tools run by the client's loop", async () => {
  const client = new OpenAI({ baseURL: `${URL}/v1`, ...clients });
  const run = { type: "function", function: { name: "weather", parameters: z.toJSONSchema(Weather), function: () => "sunny" } };
  const runner = client.chat.completions.runTools({ model: NAME, messages: ASK, tools: [run], tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 }, { maxChatCompletions: 2 });
  await runner.done();
  assert.ok(runner.messages.length >= 2);
});

test("openai: responses", async () => {
  const client = new OpenAI({ baseURL: `${URL}/v1`, ...clients });
  const tools = [{ type: "function", name: "weather", parameters: z.toJSONSchema(Weather), strict: true }];
  const options = { model: NAME, tools, max_output_tokens: 200 };
  const first = await client.responses.create({ ...options, input: ASK, tool_choice: "required" });
  const calls = first.output.filter((item) => item.type === "function_call");
  calls.forEach((call) => Weather.parse(JSON.parse(call.arguments)));
  assert.ok(calls.length);
  const results = calls.map((call) => ({ type: "function_call_output", call_id: call.call_id, output: "sunny" }));
  const stream = client.responses.stream({ ...options, input: [...ASK, ...first.output, ...results], tool_choice: "none" });
  assert.equal((await stream.finalResponse()).output[0].type, "message");
});

test("anthropic: a call is forced, streamed, and answered", async () => {
  const client = new Anthropic({ baseURL: URL, ...clients });
  const tools = [{ name: "weather", input_schema: z.toJSONSchema(Weather), cache_control: { type: "ephemeral" } }];
  const options = { model: NAME, tools, max_tokens: 200, metadata: { user_id: "me" } };
  const choice = { type: "any", disable_parallel_tool_use: true };
  const first = await client.messages.stream({ ...options, messages: ASK, tool_choice: choice }).finalMessage();
  const [call] = first.content;
  Weather.parse(call.input);
  const result = { type: "tool_result", tool_use_id: call.id, content: [{ type: "text", text: "sunny" }] };
  const messages = [...ASK, { role: "assistant", content: first.content }, { role: "user", content: [result] }];
  const last = await client.beta.messages.create({ ...options, messages, tool_choice: { type: "auto" }, betas: ["x"] });
  assert.ok(["end_turn", "max_tokens", "tool_use"].includes(last.stop_reason));
});

const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: "none" });
const models = {
  "openai-compatible": createOpenAICompatible({ name: "consort", baseURL: `${URL}/v1`, includeUsage: true, supportsStructuredOutputs: true })(NAME),
  "openai chat": openai.chat(NAME),
  "openai responses": openai.responses(NAME),
  anthropic: createAnthropic({ baseURL: `${URL}/v1`, apiKey: "none" })(NAME),
};
const weather = tool({ description: "Of a city.", inputSchema: Weather, execute: ({ city }) => `sunny in ${city}` });

for (const [name, model] of Object.entries(models)) {
  const options = { model, prompt: QUESTION, maxOutputTokens: 200, maxRetries: 0 };

  test(`ai sdk, ${name}: a forced call runs, and its result is sent back`, async () => {
    const steps = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
    const loop = { ...options, tools: { weather }, prepareStep: steps, stopWhen: stepCountIs(2) };
    const whole = await generateText(loop);
    assert.match(whole.steps[0].toolResults[0].output, /^sunny in/);
    assert.equal(whole.steps.length, 2);
    const streamed = streamText(loop);
    for await (const part of streamed.fullStream) assert.notEqual(part.type, "error", String(part.error));
    assert.match((await streamed.steps)[0].toolResults[0].output, /^sunny in/);
    assert.ok((await streamed.totalUsage).outputTokens > 0);
  });

  test(`ai sdk, ${name}: the model may call`, async () => {
    await generateText({ ...options, maxOutputTokens: 48, tools: { weather }, toolChoice: "auto", stopWhen: stepCountIs(2) });
  });

  test(`ai sdk, ${name}: an object`, async () => {
    City.parse((await generateObject({ ...options, schema: City })).object);
    const Scores = z.object({ scores: z.record(z.string(), z.int().min(0).max(9)) });
    assert.ok((await generateText({ ...options, tools: { weather: tool({ inputSchema: Scores }) }, maxOutputTokens: 8 })).finishReason);
  });
}

test("langchain: bindTools and withStructuredOutput", async () => {
  const model = new ChatOpenAI({ model: NAME, apiKey: "none", maxRetries: 0, maxTokens: 200, configuration: { baseURL: `${URL}/v1` } });
  const bound = model.bindTools([{ name: "weather", description: "Of a city.", schema: Weather }], { tool_choice: "any" });
  Weather.parse((await bound.invoke(QUESTION)).tool_calls[0].args);
  for (const method of ["functionCalling", "jsonSchema"]) City.parse(await model.withStructuredOutput(City, { method }).invoke(QUESTION));
});
