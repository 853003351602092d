// The status: what /health and /metrics tell, read again every two seconds while the page is seen.

import { askJson, askText, element, ServiceError } from "./service.js";

const EVERY_MS = 2000;
const RATE_MS = 10000; // rates are those of about this long
const KEPT_MS = 60000;
const NONE = "–";
const NAMES = {
  running: "flare_num_requests_running",
  waiting: "flare_num_requests_waiting",
  preempted: "flare_num_requests_preempted",
  finished: "flare_request_success_total",
  failed: "flare_request_failures_total",
  started: "flare_engine_start_time_seconds",
  fatal: "flare_engine_fatal",
  generated: "flare_generation_tokens_total",
  prompt: "flare_prompt_tokens_total",
  rounds: "flare_rounds_total",
  pages: "flare_pages",
  pagesFree: "flare_pages_free",
  pagesCached: "flare_pages_cached",
  hits: "flare_prefix_cache_hits_total",
  queries: "flare_prefix_cache_queries_total",
  snapshots: "flare_prefix_snapshots",
  drafting: "flare_spec_decode_num_drafts_total",
  offered: "flare_spec_decode_num_draft_tokens_total",
  accepted: "flare_spec_decode_num_accepted_tokens_total",
  passed: "flare_spec_decode_num_accepted_tokens_per_pos_total",
  copied: "flare_spec_decode_num_copied_tokens_total",
  copiedAccepted: "flare_spec_decode_num_copied_accepted_tokens_total",
  emitted: "flare_spec_decode_emitted_tokens_total",
  lanes: "flare_spec_decode_lane_rounds_total",
  chosen: "flare_policy_chosen_width_total",
  roundSeconds: "flare_round_seconds",
  firstToken: "flare_time_to_first_token_seconds",
  between: "flare_inter_token_latency_seconds",
  queued: "flare_request_queue_time_seconds",
};
const COPIES = {
  request: "copied: own text",
  history: "copied: history",
  prediction: "copied: prediction",
};

const at = (id) => document.getElementById(id);

// Prometheus text

const SAMPLE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { "\\\\": "\\", '\\"': '"', "\\n": "\n" };

// Samples by name: a Map from their labels as written to {labels, value}.
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : SAMPLE.exec(line.trim());
    if (!match) continue;
    const [, name, written = "", shown] = match;
    const labels = {};
    for (const [, label, value] of written.matchAll(LABEL)) {
      labels[label] = value.replace(/\\[\\"n]/g, (pair) => ESCAPED[pair]);
    }
    if (!found.has(name)) found.set(name, new Map());
    const value = shown === "+Inf" ? Infinity : shown === "-Inf" ? -Infinity : Number(shown);
    found.get(name).set(written, { labels, value });
  }
  return found;
}

// What was added since an earlier reading; a counter that fell has begun anew.
export function grownSince(before, now) {
  const grown = new Map();
  for (const [name, samples] of now) {
    const earlier = before.get(name);
    const change = ([written, { labels, value }]) => {
      const from = earlier?.get(written)?.value ?? 0;
      return [written, { labels, value: value >= from ? value - from : value }];
    };
    grown.set(name, new Map([...samples].map(change)));
  }
  return grown;
}

// Sum over engines and labels; null where there is no such series.
export function total(reading, name) {
  const samples = reading.get(name);
  if (!samples) return null;
  let sum = 0;
  for (const { value } of samples.values()) sum += value;
  return sum;
}

// Sums by the values of one label, in numeric order where they are numbers.
export function totals(reading, name, label) {
  const sums = new Map();
  for (const { labels, value } of reading.get(name)?.values() ?? []) {
    sums.set(labels[label], (sums.get(labels[label]) ?? 0) + value);
  }
  return new Map([...sums].sort(([a], [b]) => a - b || String(a).localeCompare(b)));
}

// Least bucket bound that so many of a histogram's observations do not exceed; null without any.
export function quantile(reading, name, share) {
  const all = total(reading, `${name}_count`);
  if (!all) return null;
  const bounds = [...totals(reading, `${name}_bucket`, "le")].map(([le, n]) => [
    le === "+Inf" ? Infinity : Number(le),
    n,
  ]);
  bounds.sort(([a], [b]) => a - b);
  return bounds.find(([, below]) => below >= share * all)?.[0] ?? null;
}

// Figures as text

const count = (value) => (value === null ? NONE : Math.round(value).toLocaleString("en"));
const ratio = (part, whole, digits) =>
  part === null || !whole ? NONE : (part / whole).toFixed(digits);
const share = (part, whole) =>
  part === null || !whole ? NONE : `${((100 * part) / whole).toFixed(1)} %`;
const rate = (part, seconds) => (part === null || !seconds ? NONE : (part / seconds).toFixed(1));
const less = (a, b) => (a === null || b === null ? null : a - b);

function time(seconds) {
  if (seconds === null || Number.isNaN(seconds)) return NONE;
  if (seconds === Infinity) return "> last bucket";
  return seconds < 1
    ? `${Number((seconds * 1000).toPrecision(3))} ms`
    : `${Number(seconds.toPrecision(3))} s`;
}

// A table whose rows are kept by their names, so that a reader's place in it survives an update.
class Table {
  constructor(title) {
    this.rows = new Map();
    this.body = element("tbody");
    this.table = element("table", {}, element("caption", {}, title), this.body);
    at("figures").append(this.table);
  }

  // rows: [name, text] or [name, text, share of a bar]
  show(rows) {
    const names = new Set(rows.map(([name]) => name));
    for (const [name, { row }] of this.rows) {
      if (names.has(name)) continue;
      row.remove();
      this.rows.delete(name);
    }
    for (const [name, text, part] of rows) this.#row(name, part !== undefined).set(text, part);
    rows.forEach(([name], place) => {
      const { row } = this.rows.get(name);
      if (this.body.children[place] !== row)
        this.body.insertBefore(row, this.body.children[place] ?? null);
    });
    this.table.hidden = !rows.length;
  }

  #row(name, barred) {
    const known = this.rows.get(name);
    if (known) return known;
    const cell = element("td");
    const bar = element("div");
    const row = element("tr", {}, element("th", { scope: "row" }, name), cell);
    cell.colSpan = barred ? 1 : 2;
    if (barred) row.append(element("td", { className: "bar" }, bar));
    const set = (text, part) => {
      if (cell.textContent !== text) cell.textContent = text;
      if (barred) bar.style.setProperty("--share", Number.isFinite(part) ? Math.min(1, part) : 0);
    };
    const made = { row, set };
    this.rows.set(name, made);
    return made;
  }
}

// What the tables hold. now: the reading; recent: growth over about ten seconds; spanned: growth
// over the span that the reader chose.

function requests(now, spanned) {
  const failures = [...totals(spanned, NAMES.failed, "code")]
    .filter(([, n]) => n > 0)
    .map(([code, n]) => [`failed: ${code}`, count(n)]);
  return [
    ["engines", count(now.get(NAMES.started)?.size ?? null)],
    ["engines failed for good", count(total(now, NAMES.fatal))],
    ["running", count(total(now, NAMES.running))],
    ["waiting", count(total(now, NAMES.waiting))],
    ["of these preempted", count(total(now, NAMES.preempted))],
    ["finished well", count(total(spanned, NAMES.finished))],
    ...(failures.length ? failures : [["failed", total(now, NAMES.running) === null ? NONE : "0"]]),
  ];
}

function speed(recent, seconds, spanned) {
  const within = (name, part) => time(quantile(spanned, name, part));
  const both = (name) => `${within(name, 0.5)}, ${within(name, 0.99)}`;
  return [
    ["generated tokens/s", rate(total(recent, NAMES.generated), seconds)],
    ["prompt tokens/s", rate(total(recent, NAMES.prompt), seconds)],
    ["rounds/s", rate(total(recent, NAMES.rounds), seconds)],
    ["first token, 50 % and 99 % within", both(NAMES.firstToken)],
    ["between tokens", both(NAMES.between)],
    ["in the queue", both(NAMES.queued)],
  ];
}

function memory(now, spanned) {
  const pages = total(now, NAMES.pages);
  const used = less(pages, total(now, NAMES.pagesFree));
  const hits = total(spanned, NAMES.hits),
    queries = total(spanned, NAMES.queries);
  const tiers = [...totals(now, NAMES.snapshots, "tier")].map(([tier, n]) => [
    `snapshots: ${tier}`,
    count(n),
  ]);
  return [
    ["pages in use", pages === null ? NONE : `${count(used)} of ${count(pages)}`, used / pages],
    ["pages that the cache alone holds", count(total(now, NAMES.pagesCached))],
    ["prompt tokens from the cache", share(hits, queries), hits / queries],
    ...tiers,
  ];
}

function sources(spanned) {
  const offered = total(spanned, NAMES.offered),
    accepted = total(spanned, NAMES.accepted);
  const copied = totals(spanned, NAMES.copied, "source"),
    passed = totals(spanned, NAMES.copiedAccepted, "source");
  const sum = (map) => [...map.values()].reduce((a, b) => a + b, 0);
  const line = (name, part, whole) => [
    name,
    whole ? `${share(part, whole)} of ${count(whole)}` : NONE,
    part / whole,
  ];
  return [
    line("all drafts", accepted, offered),
    line("drafter", less(accepted, sum(passed)), less(offered, sum(copied))),
    ...[...copied].map(([source, n]) =>
      line(COPIES[source] ?? `copied: ${source}`, passed.get(source) ?? 0, n),
    ),
    [
      "tokens a lane and round",
      ratio(total(spanned, NAMES.emitted), total(spanned, NAMES.lanes), 2),
    ],
  ];
}

function depths(spanned) {
  const rounds = total(spanned, NAMES.drafting);
  const passed = [...totals(spanned, NAMES.passed, "position")];
  return passed.map(([depth, n]) => [`draft ${Number(depth) + 1}`, share(n, rounds), n / rounds]);
}

function widths(spanned) {
  const lanes = totals(spanned, NAMES.lanes, "verify_width"),
    chosen = totals(spanned, NAMES.chosen, "verify_width");
  const all = total(spanned, NAMES.lanes);
  return [...lanes].map(([width, n]) => {
    const rounds = chosen.get(width);
    return [
      `width ${width}`,
      `${share(n, all)}${rounds ? `, chosen ${count(rounds)} times` : ""}`,
      n / all,
    ];
  });
}

function costs(spanned) {
  const sums = totals(spanned, `${NAMES.roundSeconds}_sum`, "kind");
  const counts = totals(spanned, `${NAMES.roundSeconds}_count`, "kind");
  const ran = [...counts].filter(([, n]) => n > 0);
  return ran.map(([kind, n]) => [
    kind.toLowerCase(),
    `${time(sums.get(kind) / n)}, ${count(n)} times`,
  ]);
}

const tables = Object.fromEntries(
  [
    ["requests", "Requests"],
    ["speed", "Speed"],
    ["memory", "Memory"],
    ["sources", "Drafts accepted, by source"],
    ["depths", "Drafts passed, by depth"],
    ["widths", "Lanes of rounds, by width"],
    ["costs", "Mean cost of a round, by kind"],
  ].map(([name, title]) => [name, new Table(title)]),
);

function show(readings) {
  const last = readings.at(-1) ?? { atMs: 0, found: new Map() };
  const back = (ms) => readings.find(({ atMs }) => last.atMs - atMs <= ms) ?? last;
  const near = back(RATE_MS);
  const recent = grownSince(near.found, last.found);
  // Counters begin at an engine's start, so that they are themselves the growth since.
  const spanned =
    at("span").value === "start" ? last.found : grownSince(back(KEPT_MS).found, last.found);
  tables.requests.show(requests(last.found, spanned));
  tables.speed.show(speed(recent, (last.atMs - near.atMs) / 1000, spanned));
  tables.memory.show(memory(last.found, spanned));
  tables.sources.show(sources(spanned));
  tables.depths.show(depths(spanned));
  tables.widths.show(widths(spanned));
  tables.costs.show(costs(spanned));
}

// Reading

let readings = [];
let reading = false;
let wasReady = null;

async function readHealth() {
  const place = at("ready");
  try {
    const { status, engine } = await askJson("health");
    place.dataset.state = "ready";
    place.textContent = `${status} (${engine})`;
    // The chat has asked for its models itself when the page was opened.
    if (wasReady === false) document.dispatchEvent(new CustomEvent("service-ready"));
    wasReady = true;
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    wasReady = false;
    place.dataset.state = "away";
    place.textContent = `not ready: ${error.told}`;
  }
}

async function readMetrics() {
  const place = at("figures-problem");
  let message = "";
  try {
    const found = parse(await askText("metrics"));
    if (![...found.keys()].some((name) => name.startsWith("flare_")))
      message = "/metrics tells nothing of an engine";
    const atMs = performance.now();
    readings = [...readings.filter((old) => atMs - old.atMs <= KEPT_MS), { atMs, found }];
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    message = `no figures: /metrics: ${error.told}`;
    readings = [];
  }
  place.hidden = !message;
  if (place.textContent !== message) place.textContent = message;
  show(readings);
}

async function read() {
  if (reading || document.hidden) return;
  reading = true;
  try {
    await Promise.all([readHealth(), readMetrics()]);
  } finally {
    reading = false;
  }
}

at("span").addEventListener("change", () => show(readings));
document.addEventListener("visibilitychange", read);
setInterval(read, EVERY_MS);
show(readings);
read();
