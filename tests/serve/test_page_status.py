"""The page at /ui/ in headless Chromium: figures read from /metrics, colours and widths; and the
whole of it over the demo checkpoint in a real server.

Skipped where Chromium or chromedriver is missing.
"""

import contextlib
import json
import re
import signal
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from flare_ray.errors import InvalidRequest, Overloaded
from flare_ray.metrics import names
from tests.rules.sources import ROOT
from tests.serve.processes import deployment_file, running
from tests.support import page_script as script
from tests.support.browser import unavailable
from tests.support.page_window import answered, calm, cells, metrics_of, opened, say, spans, told
from tests.support.served_checkpoint import served_checkpoint, served_deployment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
START_LIMIT_S = 120.0
FREE_LIMIT_S = 10.0
NARROW_PX = 375
MIN_TEXT_CONTRAST = 4.5  # WCAG 2.2, AA
MIN_MARK_CONTRAST = 3.0


# Status


def test_figures_are_read_and_move(page, page_server):
    engine, url = page_server
    values = {
        (names.ENGINE_START,): 1.7e9,
        (names.REQUESTS_RUNNING,): 2,
        (names.REQUESTS_WAITING,): 5,
        (names.PAGES_TOTAL,): 200,
        (names.PAGES_FREE,): 150,
        (names.PREFIX_QUERIES,): 400,
        (names.PREFIX_HITS,): 100,
        (names.GENERATION_TOKENS,): 1000,
        (names.SPEC_DRAFTS,): 100,
        (names.SPEC_DRAFT_TOKENS,): 300,
        (names.SPEC_ACCEPTED_TOKENS,): 150,
        (names.SPEC_COPIED_TOKENS, "history", "0"): 60,
        (names.SPEC_COPIED_TOKENS, "history", "1"): 40,
        (names.SPEC_COPIED_ACCEPTED_TOKENS, "history", "0"): 30,
        (names.SPEC_ACCEPTED_PER_POSITION, "0"): 90,
        (names.SPEC_ACCEPTED_PER_POSITION, "10"): 10,
        (names.SPEC_ACCEPTED_PER_POSITION, "2"): 40,
        (names.SPEC_EMITTED,): 260,
        (names.SPEC_LANE_ROUNDS, "1"): 50,
        (names.SPEC_LANE_ROUNDS, "6"): 150,
        (names.POLICY_CHOSEN, "6", "best"): 120,
        (names.REQUESTS_FAILED, 'odd"\\\\code'.replace('"', '\\"')): 4,
    }
    engine.metrics = metrics_of(values)
    page.open(f"{url}/ui/")
    page.wait_until(lambda: cells(page).get("running") == "2", "figures are shown")
    found = cells(page)
    assert found["engines"] == "1" and found["waiting"] == "5"
    assert found["pages in use"] == "50 of 200"
    assert found["prompt tokens from the cache"] == "25.0 %"
    assert found["all drafts"] == "50.0 % of 300"
    assert found["drafter"] == "60.0 % of 200"
    assert found["copied: history"] == "30.0 % of 100"
    assert found["tokens a lane and round"] == "1.30"
    depths = [name for name in found if name.startswith("draft ")]
    assert depths == ["draft 1", "draft 3", "draft 11"]
    assert found["draft 1"] == "90.0 %"
    assert found["width 6"] == "75.0 %, chosen 120 times"
    assert found['failed: odd"\\code'] == "4"
    engine.metrics = metrics_of(values | {(names.GENERATION_TOKENS,): 1500})
    page.wait_until(
        lambda: float(cells(page)["generated tokens/s"].replace("–", "0")) > 0, "a rate is shown"
    )
    page.set("#span", "minute")
    assert cells(page)["all drafts"] == "–", "no draft was offered in the last minute"
    calm(page)


def test_nothing_is_asked_while_nobody_sees_the_page(page, page_server):
    engine, _ = page_server
    read = metrics_of({(names.REQUESTS_RUNNING,): 1})
    asked = []

    async def counted():
        asked.append(time.monotonic())
        return await read()

    engine.metrics = counted
    hide = (
        "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.wait_until(lambda: len(asked) >= 2, "the page asks again and again")
    page.run(hide, True)
    time.sleep(0.5)  # what was asked just before
    before = len(asked)
    time.sleep(2.5 * (asked[1] - asked[0]))
    assert len(asked) == before
    page.run(hide, False)
    page.wait_until(lambda: len(asked) > before, "it asks at once when it is seen", limit_s=1.0)


def test_absent_series_are_dashes_and_refused_ones_are_told(page, page_server):
    engine, _ = page_server
    place = "return document.querySelector('#figures-problem').textContent"
    page.wait(f"{place}.includes('nothing of an engine')")
    assert set(cells(page).values()) <= {"–", "–, –"}

    async def refused():
        raise InvalidRequest("not for you", code="forbidden", status=403)

    engine.metrics = refused
    page.wait(f"{place}.includes('403 forbidden: not for you')")
    say(page, script.SOURCES)
    answered(page)
    engine.metrics = metrics_of({(names.REQUESTS_RUNNING,): 1})
    page.wait_until(lambda: cells(page)["running"] == "1", "figures are back")
    assert not page.visible("#figures-problem")
    calm(page, 403)


def test_prometheus_text_is_read_as_its_library_reads_it(page, page_server):
    text = (
        "# HELP a b\n# TYPE t_seconds histogram\n"
        'c_total{x="a\\"b\\\\n\\n,}",y=""} 1.5e3 1700000000\n'
        'c_total{x="z",y="2"} +Inf\nplain 3\nodd{} NaN\n'
        't_seconds_bucket{le="0.1"} 1\nt_seconds_bucket{le="2.0"} 9\n'
        't_seconds_bucket{le="+Inf"} 10\nt_seconds_count 10\nt_seconds_sum 7\n'
    )
    url = f"{page_server[1]}/ui/status.js"
    read = (
        "return [...m.parse(arguments[0])].flatMap(([name, samples]) =>"
        "[...samples.values()].map(({labels, value}) => [name, labels, String(value)]))"
    )
    theirs = [
        [s.name, dict(s.labels), float(s.value)]
        for family in text_string_to_metric_families(text)
        for s in family.samples
    ]
    read_here = page.module(url, read, text)
    ours = [[n, labels, float(v.replace("Infinity", "inf"))] for n, labels, v in read_here]
    assert sorted(map(json.dumps, ours)) == sorted(map(json.dumps, theirs))
    quantiles = (
        "const found = m.parse(arguments[0]);"
        "return [0.05, 0.5, 0.99].map((share) => String(m.quantile(found, 't_seconds', share)))"
    )
    assert page.module(url, quantiles, text) == ["0.1", "2", "Infinity"]
    grown = (
        "const r = m.grownSince(m.parse('a 5\\nb 7\\n'), m.parse('a 8\\nb 2\\nc 1\\n'));"
        "return ['a', 'b', 'c', 'd'].map((name) => m.total(r, name))"
    )
    assert page.module(url, grown) == [3, 2, 1, None]


# Looks


def _luminance(colour):
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    """WCAG's contrast ratio of two opaque colours."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


LOOKS = """
const ground = (e) => {
  for (; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (colour !== 'rgba(0, 0, 0, 0)') return colour;
  }
};
return [...document.querySelectorAll(
  '[data-source], p, label, th, td, h1, h2, h3, caption, button:not(:disabled), summary, textarea'
)].filter((e) => e.getClientRects().length).map((e) => {
  const s = getComputedStyle(e);
  return [e.textContent.slice(0, 30), s.color, ground(e), e.dataset.source, s.textDecorationColor];
});
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_marks_stand_out_in_both_colour_schemes(page, page_server, scheme):
    engine, _ = page_server
    page.scheme(scheme)
    say(page, script.SOURCES)
    answered(page)
    engine.refusal = Overloaded("full", retry_after_s=3.0)
    say(page, script.SOURCES)
    told(page)
    looks = page.run(LOOKS)
    assert len(looks) > 40
    for text, colour, ground, source, mark in looks:
        assert contrast(colour, ground) >= MIN_TEXT_CONTRAST, (text, colour, ground)
        if source not in (None, "target"):
            assert contrast(mark, ground) >= MIN_MARK_CONTRAST, (text, mark, ground)
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (_luminance(ground) > 0.5) == (scheme == "light")


def test_a_narrow_window_needs_no_sideways_scrolling(page, page_server):
    engine, _ = page_server
    page.resize(NARROW_PX, 700)
    page.click("#settings summary")
    page.set("#tools", json.dumps([TOOL]))
    say(page, script.WIDE)
    answered(page)
    say(page, f"{script.CALL} {script.WORD}")
    answered(page, 2)
    engine.metrics = metrics_of({(names.REQUESTS_FAILED, "context_length_exceeded"): 10**9})
    page.wait_until(lambda: "failed: context_length_exceeded" in cells(page), "a long row is shown")
    for box in ("document.documentElement", "document.querySelector('#log')"):
        wide, seen = page.run(f"const e = {box}; return [e.scrollWidth, e.clientWidth]")
        assert wide <= seen <= NARROW_PX
    outside = page.run(
        "return [...document.querySelectorAll('body *')].filter((e) => e.getClientRects().length"
        " && e.getBoundingClientRect().right > innerWidth + 0.5).map((e) => e.outerHTML)"
    )
    assert not outside


def test_every_control_has_a_name_and_is_reached_by_the_keyboard(page):
    page.click("#settings summary")
    nameless = page.run(
        "return [...document.querySelectorAll('input, select, textarea, button')].filter((e) =>"
        "!(e.labels?.length || e.textContent.trim()) || e.tabIndex < 0).map((e) => e.outerHTML)"
    )
    assert not nameless
    nodes = page.devtools("Accessibility.getFullAXTree")["nodes"]
    roles = {(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if "role" in n}
    assert {("log", "Conversation"), ("region", "Chat"), ("region", "Status")} <= roles
    assert ("button", "Send") in roles


# A real server


@pytest.fixture
def debug_serve(tmp_path, free_port):
    """`debug-serve` of a deployment file; the function that starts it returns its address."""
    with contextlib.ExitStack() as stack:

        def start(file):
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            command = running(
                *("debug-serve", str(file), "--port", str(port)),
                log=tmp_path / "server.log",
                url=url,
                start_limit_s=START_LIMIT_S,
                number=signal.SIGINT,
            )
            stack.enter_context(command)
            return url

        yield start


def gauge(url, series):
    total = "_total" if series.kind is names.Kind.COUNTER else ""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=10.0).text)
    found = (s for family in families for s in family.samples if s.name == series.name + total)
    return sum(sample.value for sample in found)


def test_demo_answers_with_drafts_of_several_sources_and_its_figures_move(debug_serve, window):
    url = debug_serve(ROOT / "deployments" / "glm-demo.yaml")
    page = opened(window, url)
    assert page.text("#ready").startswith("ready (")
    page.set("#temperature", "0")
    say(page, "Define principal.")
    answered(page)
    first = page.text(".content")
    assert first
    page.click("#clear")
    page.set("#prediction", first)
    say(page, "Define principal.")
    answered(page)
    assert page.text(".content") == first, "a prediction changes no text"
    sources = {source for source, _ in spans(page, ".content")}
    assert {"target", "prediction"} <= sources
    generated = gauge(url, names.GENERATION_TOKENS)
    page.wait_until(
        lambda: cells(page).get("copied: prediction", "–") != "–", "the prediction is counted"
    )
    found = cells(page)
    assert float(found["generated tokens/s"]) > 0
    assert int(found["finished well"]) >= 2
    assert found["pages in use"] == f"0 of {gauge(url, names.PAGES_TOTAL):.0f}"
    assert [name for name in found if name.startswith("width ")]
    assert re.fullmatch(r"[\d.]+ m?s, \d+ times", found["speculative"])
    assert gauge(url, names.GENERATION_TOKENS) == generated
    calm(page)


def test_stopping_frees_the_engine(debug_serve, window, tmp_path, free_port):
    checkpoint = served_checkpoint(tmp_path)  # it goes on until its context is full
    file = deployment_file(tmp_path, served_deployment(checkpoint), free_port())
    url = debug_serve(file)
    page = opened(window, url)
    say(page, "x")
    page.wait("return document.querySelector('.assistant .text')?.textContent.length > 50")
    page.wait_until(lambda: cells(page)["running"] == "1", "the status shows a running request")
    page.click("#stop")
    deadline = time.monotonic() + FREE_LIMIT_S
    while gauge(url, names.REQUESTS_RUNNING) or gauge(url, names.REQUESTS_WAITING):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert gauge(url, names.PAGES_FREE) == gauge(url, names.PAGES_TOTAL)
    generated = gauge(url, names.GENERATION_TOKENS)
    time.sleep(0.5)
    assert gauge(url, names.GENERATION_TOKENS) == generated
    page.wait_until(lambda: cells(page)["running"] == "0", "the status shows none")
    calm(page)
