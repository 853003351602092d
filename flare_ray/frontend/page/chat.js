// The chat: settings and conversation in, a streamed answer out, each piece marked by its source.
//
// Text of answers only ever becomes text nodes.

import { apiKey, ask, askJson, element, events, keepApiKey, ServiceError } from "./service.js";

const SOURCES = {
  target: [
    "the target's own",
    "Drawn by the target itself: a correction, a bonus token, an answer's first token",
  ],
  drafter: ["drafter", "Accepted drafts that the drafter proposed"],
  own_text: ["copied: own text", "Accepted drafts copied from this request's prompt or answer"],
  history: ["copied: history", "Accepted drafts copied from what other requests were answered"],
  prediction: ["copied: prediction", "Accepted drafts copied from the predicted output"],
  grammar: ["grammar", "The only text that the request's grammar allowed there"],
};
const UNKNOWN = ["not told", "The service did not tell where this came from"];
const NUMBERS = {
  temperature: "a number",
  top_p: "a number",
  max_tokens: "a whole number",
  seed: "a whole number",
};
const NO_MODELS = "models: ";
const NEAR_END_PX = 80;
const FOLLOW_MS = 100;
const SHORTEST_S = 0.1; // what arrived in less time than this has no speed worth telling

const at = (id) => document.getElementById(id);
const log = at("log");

let conversation = []; // messages of turns that ended well, or were stopped after some content
let calls = []; // of the last answer: {id, field}, still without results
let running = null; // the AbortController of an open answer

class Refused extends Error {} // a setting cannot be sent

// Settings

function number(id) {
  const text = at(id).value.trim();
  if (!text) return undefined;
  const value = Number(text);
  const whole = NUMBERS[id] === "a whole number";
  // Beyond 2^53 a number in JavaScript is another one than what was typed.
  if (!Number.isFinite(value) || (whole && !Number.isSafeInteger(value))) {
    throw new Refused(`${id}: ${text} is not ${NUMBERS[id]}${whole ? " up to 2^53" : ""}`);
  }
  return value;
}

function tools() {
  const text = at("tools").value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Refused(`tools: no JSON: ${error.message}`);
  }
}

function bodyOf(sent) {
  const system = at("system").value;
  const body = {
    model: at("model").value,
    messages: [
      ...(system.trim() ? [{ role: "system", content: system }] : []),
      ...conversation,
      ...sent,
    ],
    stream: true,
    stream_options: { include_usage: true },
    return_token_sources: true,
    tools: tools(),
  };
  for (const id of Object.keys(NUMBERS)) body[id] = number(id);
  const reasoning = at("reasoning").value;
  if (reasoning === "off") body.chat_template_kwargs = { enable_thinking: false };
  else if (reasoning) body.reasoning_effort = reasoning;
  const prediction = at("prediction").value;
  if (prediction.trim()) body.prediction = { type: "content", content: prediction };
  return body;
}

// Messages of the next turn: results of the calls that wait for one, then what the user wrote.
function nextMessages() {
  const results = calls.map(({ id, field }) => ({
    role: "tool",
    tool_call_id: id,
    content: field.value,
  }));
  const text = at("message").value;
  return text.trim() ? [...results, { role: "user", content: text }] : results;
}

// What is shown

function describe(source) {
  return SOURCES[source] ?? UNKNOWN;
}

function appendPiece(box, text, source) {
  const last = box.lastElementChild;
  if (last?.dataset.source === source) {
    last.firstChild.appendData(text);
    return;
  }
  const piece = element("span", { title: describe(source)[1] }, text);
  piece.dataset.source = source;
  box.append(piece);
}

// The log follows its end until its reader scrolls up. Where it ends costs a layout of all its
// text, so it is looked at now and then instead of with every piece.
let follows = true;
let lastTop = 0;
let following = 0; // timer

function follow() {
  following ||= setTimeout(() => {
    following = 0;
    if (follows) log.scrollTop = log.scrollHeight;
  }, FOLLOW_MS);
}

function scrolled() {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
  if (log.scrollTop < lastTop) follows = atEnd;
  else follows ||= atEnd;
  lastTop = log.scrollTop;
}

// One answer under construction.
class Answer {
  constructor() {
    this.box = element("article", { className: "assistant" }, element("h3", {}, "Assistant"));
    this.message = { role: "assistant", content: "" };
    this.finish = null;
    this.usage = null;
    this.startedMs = performance.now();
    this.firstMs = null;
    this.lastMs = null;
    this.shares = new Map(); // characters by source
    this.parts = [];
    log.append(this.box);
  }

  take(event) {
    this.id = event.id;
    if (event.usage) this.usage = event.usage;
    for (const choice of event.choices) {
      if (choice.finish_reason) this.finish = choice.finish_reason;
      const { reasoning_content: reasoning, content, tool_calls: told = [] } = choice.delta;
      if (reasoning || content || told.length) this.#clock();
      if (reasoning) this.#text("reasoning_content", reasoning, choice.token_sources);
      if (content) this.#text("content", content, choice.token_sources);
      for (const part of told) this.#call(part);
    }
  }

  #clock() {
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
  }

  #text(field, text, sources) {
    this.message[field] = (this.message[field] ?? "") + text;
    const box = field === "content" ? this.#content() : this.#reasoning();
    for (const span of sources?.[field] ?? [{ source: "unknown", text }]) {
      appendPiece(box, span.text, span.source);
      this.shares.set(span.source, (this.shares.get(span.source) ?? 0) + [...span.text].length);
    }
  }

  #content() {
    this.contentBox ??= this.box.appendChild(element("div", { className: "text content" }));
    return this.contentBox;
  }

  #reasoning() {
    if (!this.reasoningBox) {
      this.reasoningBox = element("div", { className: "text" });
      const summary = element("summary", {}, "Reasoning");
      this.box.append(
        element("details", { className: "reasoning", open: true }, summary, this.reasoningBox),
      );
    }
    return this.reasoningBox;
  }

  #call(part) {
    const call = (this.parts[part.index] ??= { id: part.id, name: "", arguments: "" });
    call.name += part.function.name ?? "";
    call.arguments += part.function.arguments ?? "";
    if (!call.box) {
      call.code = element("code");
      call.box = element("div", { className: "call" }, element("h3", {}, "Tool call"), call.code);
      this.box.append(call.box);
    }
    call.code.textContent = `${call.name}(${call.arguments})`;
  }

  // The answer is whole: what is added to the conversation, and calls that wait for results.
  end() {
    const made = this.#wholeCalls();
    if (made.length) {
      this.message.tool_calls = made.map(({ id, name, arguments: text }) => ({
        id,
        type: "function",
        function: { name, arguments: text },
      }));
      if (!this.message.content) this.message.content = null;
    }
    this.#figures();
    return made.map(({ id, name, box }) => {
      const field = element("textarea", { rows: 1 });
      box.append(element("label", {}, `Result of ${name}, sent with the next message `, field));
      return { id, field };
    });
  }

  note(text, box = this.box) {
    box.append(element("p", { className: "note" }, text));
  }

  // A call that the budget cut off has arguments that are no JSON, which no later turn may send.
  #wholeCalls() {
    return this.parts.filter(Boolean).filter((call) => {
      const whole = isJson(call.arguments);
      if (!whole) this.note("broke off; it is not part of the conversation", call.box);
      return whole;
    });
  }

  #figures() {
    const lines = [
      this.#sources(),
      this.#tokens(),
      this.#times(),
      `finished: ${this.finish ?? "not told"}`,
    ];
    const properties = { className: "figures", title: `answer ${this.id}` };
    this.box.append(element("p", properties, lines.filter(Boolean).join(" · ")));
  }

  #sources() {
    const all = [...this.shares.values()].reduce((a, b) => a + b, 0);
    const shown = [...this.shares].map(
      ([source, part]) => `${describe(source)[0]} ${percent(part / all)}`,
    );
    return all ? `characters: ${shown.join(", ")}` : "";
  }

  #tokens() {
    if (!this.usage) return "";
    const { prompt_tokens: prompt, completion_tokens: completion } = this.usage;
    const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
    const facts = this.usage.completion_tokens_details ?? {};
    const accepted = facts.accepted_prediction_tokens ?? 0;
    const rejected = facts.rejected_prediction_tokens ?? 0;
    const whose = this.predicted ? "drafts of the prediction" : "drafts";
    return [
      `${prompt} prompt tokens (${cached} cached)`,
      `${completion} of output (${facts.reasoning_tokens ?? 0} reasoning)`,
      `${accepted} ${whose} accepted, ${rejected} rejected`,
    ].join(", ");
  }

  #times() {
    if (this.firstMs === null) return "";
    const parts = [`first text after ${Math.round(this.firstMs - this.startedMs)} ms`];
    const seconds = (this.lastMs - this.firstMs) / 1000;
    const later = (this.usage?.completion_tokens ?? 0) - 1; // the first token is the prompt's
    if (later > 0 && seconds >= SHORTEST_S) parts.push(`${(later / seconds).toFixed(1)} tokens/s`);
    const accepted = this.usage?.completion_tokens_details?.accepted_prediction_tokens;
    // A round gives its accepted drafts and one token more. Beside a prediction, usage tells of
    // that one's drafts alone, so that rounds cannot be counted.
    if (later > 0 && accepted !== undefined && !this.predicted) {
      parts.push(`${(later / Math.max(1, later - accepted)).toFixed(2)} tokens a round`);
    }
    return parts.join(", ");
  }
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch (notJson) {
    return false;
  }
}

const percent = (share) => `${Math.round(share * 100)} %`;

function showTurn(messages) {
  for (const { role, content } of messages) {
    const title = role === "user" ? "You" : "Result";
    const text = element("div", { className: "text" }, content);
    log.append(element("article", { className: "user" }, element("h3", {}, title), text));
  }
  follows = true;
  follow();
}

function problem(text) {
  at("problem").textContent = text;
  at("problem").hidden = !text;
}

// Turns

async function send() {
  problem("");
  let sent, body;
  try {
    sent = nextMessages();
    if (!sent.length) throw new Refused("write a message first");
    body = bodyOf(sent);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    problem(error.message);
    return;
  }
  const controller = (running = new AbortController());
  busy(true);
  showTurn(sent);
  at("message").value = "";
  const answer = new Answer();
  answer.predicted = body.prediction !== undefined;
  try {
    const response = await ask("v1/chat/completions", { body, signal: controller.signal });
    for await (const event of events(response)) {
      answer.take(event);
      follow();
    }
    controller.signal.throwIfAborted();
    keep(sent, answer, answer.end());
  } catch (error) {
    broken(sent, answer, error);
  } finally {
    follow();
    // A new conversation may have begun meanwhile.
    if (running === controller) {
      running = null;
      busy(false);
    }
  }
}

function keep(sent, answer, newCalls) {
  for (const { field } of calls) field.readOnly = true;
  calls = newCalls;
  conversation.push(...sent, answer.message);
}

// A turn that did not end well is left out of the conversation, unless its reader stopped it with
// some content there; then calls that may be half told are left out.
function broken(sent, answer, error) {
  const stopped = error.name === "AbortError";
  if (!stopped && !(error instanceof ServiceError)) throw error;
  if (!answer.box.isConnected) return; // the conversation it belonged to is gone
  if (stopped && answer.message.content) {
    answer.note("stopped; what there is stays in the conversation");
    keep(sent, answer, []);
    return;
  }
  answer.note(`${stopped ? "stopped" : error.told}; this turn is not part of the conversation`);
  if (!stopped) problem(error.told);
  const text = sent.at(-1).role === "user" ? sent.at(-1).content : "";
  if (!at("message").value) at("message").value = text;
}

function busy(yes) {
  at("send").disabled = yes;
  at("stop").disabled = !yes;
  log.setAttribute("aria-busy", String(yes));
  if (!yes) at("message").focus({ preventScroll: true });
}

function clear() {
  running?.abort();
  running = null;
  conversation = [];
  calls = [];
  log.replaceChildren();
  problem("");
  busy(false);
}

// Models

async function loadModels() {
  const wanted = at("model").value;
  try {
    const { data } = await askJson("v1/models");
    const options = data.map(({ id, max_model_len: most }) =>
      element("option", { value: id, title: most ? `${most} tokens of context` : "" }, id),
    );
    at("model").replaceChildren(...options);
    if (data.some(({ id }) => id === wanted)) at("model").value = wanted;
    if (at("problem").textContent.startsWith(NO_MODELS)) problem("");
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    problem(`${NO_MODELS}${error.told}`);
  }
}

function showLegend() {
  const items = Object.entries(SOURCES).map(([source, [name, title]]) => {
    const mark = element("span", { title }, name);
    mark.dataset.source = source;
    return element("li", {}, mark);
  });
  at("legend").replaceChildren(...items);
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) send();
});
at("message").addEventListener("keydown", (event) => {
  // While an input method composes, Enter takes its proposal.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
log.addEventListener("scroll", scrolled, { passive: true });
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", clear);
at("coloured").addEventListener("change", () =>
  log.classList.toggle("plain", !at("coloured").checked),
);
at("key").value = apiKey();
at("key").addEventListener("change", () => {
  keepApiKey(at("key").value.trim());
  loadModels();
});
// An engine may come up, or another model, after the page.
document.addEventListener("service-ready", loadModels);

showLegend();
loadModels();
