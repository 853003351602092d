// How the page talks to the service that it came from: addresses, the API key, failures, streams.

// The page lies at ui/ below the service's root, whatever stands before that in the address.
const ROOT = new URL("../", document.baseURI);
const KEY_ITEM = "flare_ray.api_key";
const ANSWER_LIMIT_MS = 10000;

let heldKey = "";

// A failure as the service tells it (OpenAI's error shape), or as the browser does.
export class ServiceError extends Error {
  constructor(
    message,
    { status = 0, type = "", code = "", param = "", requestId = "", retryAfter = "" } = {},
  ) {
    super(message);
    Object.assign(this, { status, type, code, param, requestId, retryAfter });
  }

  // One line for people.
  get told() {
    const head = [this.status || "", this.code || this.type || ""].filter(Boolean).join(" ");
    const tail = [
      this.param && `parameter ${this.param}`,
      this.retryAfter && `try again in ${this.retryAfter} s`,
      this.requestId && `request ${this.requestId}`,
    ].filter(Boolean);
    return [head && `${head}: `, this.message, tail.length ? ` (${tail.join(", ")})` : ""].join("");
  }
}

// The key lives as long as the tab. Where the browser refuses storage it lives as long as the page.
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY_ITEM) ?? heldKey;
  } catch (refused) {
    return heldKey;
  }
}

export function keepApiKey(key) {
  heldKey = key;
  try {
    if (key) sessionStorage.setItem(KEY_ITEM, key);
    else sessionStorage.removeItem(KEY_ITEM);
  } catch (refused) {
    console.info("the browser keeps no session storage; the key lasts until the page is left");
  }
}

// The response to a request; one that is no success is thrown as a ServiceError.
export async function ask(path, { body, signal = AbortSignal.timeout(ANSWER_LIMIT_MS) } = {}) {
  const headers = {};
  if (apiKey()) headers.authorization = `Bearer ${apiKey()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const options = {
    headers,
    signal,
    method: body === undefined ? "GET" : "POST",
    cache: "no-store",
  };
  if (body !== undefined) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(new URL(path, ROOT), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.name === "TimeoutError") throw new ServiceError(`/${path} has not answered in time`);
    throw new ServiceError(`/${path} cannot be reached: ${error.message}`);
  }
  if (!response.ok) throw await failure(response);
  return response;
}

// Text of a response that is read whole.
export async function askText(path) {
  const response = await ask(path);
  try {
    return await response.text();
  } catch (error) {
    throw new ServiceError(`/${path} broke off: ${error.message}`);
  }
}

export async function askJson(path) {
  const text = await askText(path);
  try {
    return JSON.parse(text);
  } catch (notJson) {
    throw new ServiceError(`/${path} is not answered by this service: ${text.slice(0, 100)}`);
  }
}

async function failure(response) {
  const text = await response.text();
  const facts = {
    status: response.status,
    requestId: response.headers.get("x-request-id") ?? "",
    retryAfter: response.headers.get("retry-after") ?? "",
  };
  const error = inner(text);
  // A proxy in between answers in a shape of its own.
  if (error === null)
    return new ServiceError(text.slice(0, 500) || response.statusText || "refused", facts);
  return told(error, facts);
}

function told(error, facts) {
  return new ServiceError(error.message ?? "no reason given", {
    ...facts,
    type: error.type ?? "",
    code: error.code ?? "",
    param: error.param ?? "",
  });
}

function inner(text) {
  try {
    const error = JSON.parse(text)?.error;
    return typeof error === "object" ? error : null;
  } catch (notJson) {
    return null;
  }
}

// Objects of a stream of server-sent events, up to [DONE].
export async function* events(response) {
  const requestId = response.headers.get("x-request-id") ?? "";
  for await (const data of dataLines(response.body)) {
    if (data === "[DONE]") return;
    let event;
    try {
      event = JSON.parse(data);
    } catch (notJson) {
      throw new ServiceError(`the stream holds something else than events: ${data.slice(0, 100)}`, {
        requestId,
      });
    }
    if (event.error) throw told(event.error, { requestId });
    yield event;
  }
  throw new ServiceError("the stream broke off before its end", { requestId });
}

// What stands behind `data:`; events of this service have one such line each.
async function* dataLines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServiceError(`the stream broke off: ${error.message}`);
  } finally {
    await reader.cancel().catch(() => {}); // already broken or ended: nothing is left to give back
  }
}

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}
