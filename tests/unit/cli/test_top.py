"""`flare-ray top`: what two readings of /metrics come to."""

import http.server
import re
import threading

import pytest

from flare_ray.cli import top
from flare_ray.errors import ConfigError
from flare_ray.metrics import names
from flare_ray.metrics.export import render
from flare_ray.metrics.exposition import Exposition
from flare_ray.metrics.recorder import Recorder


@pytest.fixture
def recorder():
    return Recorder("engine", "e1")


def text_of(recorder):
    return render([recorder.snapshot()], model_name="m", compat=False).decode()


def reading(recorder):
    return Exposition.parse(text_of(recorder))


def shown(before, now, seconds=2.0):
    return {
        name: value
        for section in top.sections(before, now, seconds)
        for name, value in section.rows
    }


def test_rates_and_shares_are_over_the_time_between_two_readings(recorder):
    recorder.counter(names.GENERATION_TOKENS).add(100)
    before = reading(recorder)
    recorder.counter(names.GENERATION_TOKENS).add(50)
    recorder.counter(names.SPEC_DRAFTS).add(10)
    recorder.counter(names.SPEC_DRAFT_TOKENS).add(40)
    recorder.counter(names.SPEC_ACCEPTED_TOKENS).add(30)
    recorder.counter(names.SPEC_ACCEPTED_PER_POSITION, "0").add(9)
    recorder.counter(names.SPEC_LANE_ROUNDS, "5").add(10)
    recorder.counter(names.SPEC_EMITTED).add(40)
    recorder.gauge(names.REQUESTS_RUNNING).set(3)
    recorder.gauge(names.PAGES_TOTAL).set(100)
    recorder.gauge(names.PAGES_FREE).set(75)
    rows = shown(before, reading(recorder))
    assert rows["generated a second"] == "25.0"
    assert rows["accepted of offered"] == "75%"
    assert rows["passed by depth"] == "90%"
    assert rows["tokens a lane and round"] == "4.00"
    assert rows["widths"] == "5: 100%"
    assert rows["running"] == "3"
    assert rows["pages in use"] == "25 of 100 (25%)"


def test_a_service_without_traffic_shows_no_shares_and_no_latencies(recorder):
    rows = shown(reading(recorder), reading(recorder))
    assert rows["accepted of offered"] == top.NONE
    assert rows["time to first token"] == f"{top.NONE}  {top.NONE}"


def test_latencies_are_bucket_bounds_of_the_interval(recorder):
    first = recorder.histogram(names.TIME_TO_FIRST_TOKEN)
    first.observe(1e9)
    before = reading(recorder)
    bounds = names.TIME_TO_FIRST_TOKEN.buckets
    for _ in range(99):
        first.observe(bounds[2])
    first.observe(bounds[4])
    rows = shown(before, reading(recorder))
    bound = f"{bounds[2] * 1000:.4g} ms"
    assert rows["time to first token"] == f"{bound}  {bound}"
    first.observe(1e9)
    first.observe(1e9)
    assert shown(before, reading(recorder))["time to first token"].endswith("> last bucket")


@pytest.fixture
def answering(free_port):
    """A server that answers every request with a status and a text."""
    servers = []

    def start(status, text):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args):
                pass

        server = http.server.HTTPServer(("127.0.0.1", free_port()), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_one_view_is_printed_and_the_command_ends(answering, recorder, capsys):
    recorder.gauge(names.REQUESTS_RUNNING).set(7)
    url = answering(200, text_of(recorder))
    top.watch(url, interval_s=0.01, once=True)
    assert re.search(r"running\W+7\W", capsys.readouterr().out)


def test_a_later_failure_is_shown_as_it_is_said_and_watching_goes_on(monkeypatch, recorder, capsys):
    shown = "answered 503: [/b] away"
    readings = iter([reading(recorder), ConfigError(shown), KeyboardInterrupt()])

    def read(url):
        one = next(readings)
        if isinstance(one, BaseException):
            raise one
        return one

    monkeypatch.setattr(top, "read", read)
    top.watch("http://service", interval_s=0.01)
    assert shown in capsys.readouterr().out
    assert next(readings, None) is None


@pytest.mark.parametrize(
    ("status", "text", "words"), [(503, "not ready", "503"), (200, "<html>", "no Prometheus text")]
)
def test_what_is_no_metrics_page_is_named(answering, status, text, words):
    with pytest.raises(ConfigError, match=words):
        top.read(answering(status, text))


def test_an_address_where_nothing_listens_is_named(free_port):
    with pytest.raises(ConfigError, match="--url"):
        top.read(f"http://127.0.0.1:{free_port()}")
