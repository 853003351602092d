"""What chaos counts as a clear end, and what it does not."""

import io
import json
from collections import Counter

import httpx
import pytest
from rich.console import Console

from benchmarks.serving import chaos
from benchmarks.serving.chaos import BOUNDS, Kills, chaos_metrics
from benchmarks.serving.chaos_load import OWN, end_of_events, end_of_whole
from benchmarks.serving.workload import PROMPTS

CHUNK = json.dumps({"choices": [{"delta": {"content": "a"}, "finish_reason": None}]})
LAST = json.dumps({"choices": [{"delta": {}, "finish_reason": "stop"}]})
ERROR = json.dumps({"error": {"message": "the engine has stopped"}})
SHORT_MINUTES = 0.7


@pytest.mark.parametrize(
    ("events", "end"),
    [
        ((CHUNK, LAST, "[DONE]"), "complete"),
        ((CHUNK, ERROR, "[DONE]"), "error_event"),
        ((CHUNK, "[DONE]"), "truncated"),
        ((CHUNK, LAST), "truncated"),
        ((), "truncated"),
        ((ERROR, CHUNK, "[DONE]"), "truncated"),
        ((ERROR, ERROR, "[DONE]"), "truncated"),
    ],
)
def test_a_stream_is_complete_ends_with_one_error_or_is_truncated(events, end):
    assert end_of_events(events)[0] == end


@pytest.mark.parametrize(
    ("status", "body", "end"),
    [
        (200, '{"choices": [{"finish_reason": "stop"}], "usage": {"total_tokens": 1}}', "complete"),
        (200, '{"choices": [{"finish_reason": null}]}', "truncated"),
        (503, '{"error": {"message": "no engine is ready"}}', "error_status"),
        (500, "Internal Server Error", "proxy_status"),
        (404, "Not Found", "truncated"),
        (503, "{}", "truncated"),
    ],
)
def test_an_answer_is_complete_an_error_in_the_apis_form_or_truncated(status, body, end):
    assert end_of_whole(httpx.Response(status, text=body))[0] == end


def test_plain_text_that_a_replica_wrote_itself_is_no_clear_end():
    answer = httpx.Response(500, text="Internal Server Error", headers={OWN: "7"})
    assert end_of_whole(answer)[0] == "truncated"


@pytest.mark.parametrize(
    ("ends", "unclear"), [({"complete": 9, "connection": 2}, 0), ({"complete": 9, "silent": 1}, 1)]
)
def test_unclear_ends_miss_the_target(ends, unclear):
    held = {bound.metric: 0 for bound in BOUNDS[2:]}
    kills = Kills({"rank": [3.0, 9.5], "ingress": [2.0]})
    metrics = chaos_metrics(Counter(ends), kills, held)
    assert metrics["unclear_ends"] == unclear
    assert metrics["recovery_s_max"] == 9.5
    assert [b.metric for b in BOUNDS if not b.is_met_by(metrics)] == ["unclear_ends"] * unclear


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_short_storm_has_only_clear_ends(free_port):
    metrics = chaos.run(free_port(), PROMPTS, SHORT_MINUTES, Console(file=io.StringIO()))
    assert metrics["unclear_ends"] == 0
    assert metrics["kills"]
    assert metrics["requests"]["complete"] > 0
    assert [metrics[bound.metric] for bound in BOUNDS[2:]] == [0] * len(BOUNDS[2:])
    assert metrics["sockets_seen"] > 0
