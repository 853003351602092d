// One call of the openai package of Node: node client.cjs URL ACTION FIELDS
// ACTION: ask, stream or leave. FIELDS: of /v1/chat/completions, as JSON. Prints the choice, or the
// error's status and words, as JSON. `leave` prints a line at the first piece, goes when it is sent
// a line, and ends when its input does.
"use strict";
const OpenAI = require("openai");
const readline = require("node:readline");

const [url, action, given] = process.argv.slice(2);
const fields = JSON.parse(given);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 60000 });
const chat = client.chat.completions;

const actions = {
  async ask() {
    const { choices, usage } = await chat.create(fields);
    return { choice: choices[0], tokens: [usage.prompt_tokens, usage.completion_tokens] };
  },
  async stream() {
    const stream = chat.stream(fields);
    let pieces = 0;
    stream.on("chunk", () => pieces++);
    return { choice: (await stream.finalChatCompletion()).choices[0], pieces };
  },
  async leave() {
    const stream = await chat.create({ ...fields, stream: true });
    const lines = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();
    await stream[Symbol.asyncIterator]().next();
    console.log("open");
    await lines.next();
    stream.controller.abort();
    await lines.next();
    return {};
  },
};

actions[action]().then(
  (found) => console.log(JSON.stringify(found)),
  (error) => {
    if (!(error instanceof OpenAI.APIError) || error.status === undefined) throw error;
    console.log(JSON.stringify({ status: error.status, message: error.message }));
  },
);
