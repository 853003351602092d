// The scripted suite through the openai package of Node: node openai_suite.cjs URL WORDS
// Prints the name of each part that passed; the first failure ends it.
"use strict";
const assert = require("node:assert/strict");
const OpenAI = require("openai");

const [url, words] = process.argv.slice(2);
const { ENDLESS, RESULT, VERDICT, GREETING, TOOL, FORMAT } = JSON.parse(words);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0, timeout: 20000 });
const user = (content) => ({ role: "user", content });
const create = (fields) => client.chat.completions.create({ model: "tiny", ...fields });

const parts = {
  async chat() {
    const answer = await create({ messages: [user("hi")] });
    assert.equal(answer.choices[0].message.content, GREETING);
  },
  async stream() {
    let text = "";
    for await (const chunk of await create({ messages: [user("hi")], stream: true })) {
      text += chunk.choices[0].delta.content ?? "";
    }
    assert.equal(text, GREETING);
  },
  async "tool loop"() {
    const ask = user("how is the weather?");
    const stream = client.chat.completions.stream({ model: "tiny", messages: [ask], tools: [TOOL] });
    const { message, finish_reason } = (await stream.finalChatCompletion()).choices[0];
    assert.equal(finish_reason, "tool_calls");
    assert.equal(message.tool_calls.length, 2);
    for (const call of message.tool_calls) {
      assert.deepEqual(JSON.parse(call.function.arguments), { city: "Rome €" });
    }
    const results = message.tool_calls.map((call) => ({
      role: "tool",
      tool_call_id: call.id,
      content: RESULT,
    }));
    const assistant = { role: "assistant", content: null, tool_calls: message.tool_calls.map(
      ({ id, type, function: { name, arguments: text } }) => (
        { id, type, function: { name, arguments: text } }
      ),
    ) };
    const last = await create({ messages: [ask, assistant, ...results], tools: [TOOL] });
    assert.equal(last.choices[0].message.content, VERDICT);
  },
  async schema() {
    const answer = await create({ messages: [user("hi")], response_format: FORMAT });
    assert.deepEqual(JSON.parse(answer.choices[0].message.content), { city: "Rome" });
  },
  async logprobs() {
    const fields = { logprobs: true, top_logprobs: 1 };
    const answer = await create({ messages: [user("hi")], ...fields });
    assert.equal(answer.choices[0].logprobs.content[1].logprob, -1 / 8);
  },
  async errors() {
    await assert.rejects(create({ messages: [user("hi")], temperature: -1 }), (error) => (
      error instanceof OpenAI.BadRequestError && error.param === "temperature"
    ));
    await assert.rejects(create({ messages: [user("hi")], model: "other" }), OpenAI.NotFoundError);
  },
  async leaving() {
    const stream = await create({ messages: [user(ENDLESS)], stream: true });
    for await (const _ of stream) break;
    stream.controller.abort();
  },
};

(async () => {
  for (const [name, run] of Object.entries(parts)) {
    await run();
    console.log(name);
  }
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
