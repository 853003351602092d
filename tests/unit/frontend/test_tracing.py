"""OpenTelemetry spans of requests: what they hold, and that nothing is made unless asked for
(contract: A5)."""

import dataclasses
import sys

import pytest

from flare_ray.contracts.messages import Delta, Failed
from flare_ray.errors import ConfigError
from flare_ray.frontend.tracing import Tracing, open_tracing
from tests.support.fake_engine_client import answer, byte_tokens
from tests.unit.frontend.conftest import chat_body

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def traced(make_api):
    """An API with tracing, and the spans that have ended."""
    export = pytest.importorskip(
        "opentelemetry.sdk.trace.export", reason="the tracing extra is not installed"
    )
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    tracing = Tracing(provider.get_tracer("test"), model_name="tiny")

    def make(script):
        api = make_api(script)
        api.settings = dataclasses.replace(api.settings, tracing=tracing)
        return api

    return make, exporter.get_finished_spans


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_span_below_its_callers(traced, stream):
    make, spans = traced
    body = chat_body(stream=stream)
    make(answer("why</think>yes")).post(
        "/v1/chat/completions", body, headers={"traceparent": PARENT, "x-request-id": "mine"}
    )
    (span,) = spans()
    assert f"{span.context.trace_id:032x}" in PARENT
    assert f"{span.parent.span_id:016x}" in PARENT
    found = dict(span.attributes)
    assert found["flare.request_id"].endswith("mine")
    assert found["gen_ai.request.model"] == "tiny"
    assert found["gen_ai.usage.output_tokens"] == len(byte_tokens("why</think>yes")) + 1
    assert found["gen_ai.response.finish_reasons"] == ("stop",)
    assert [event.name for event in span.events] == ["first_token"]


def test_text_that_goes_past_the_reader_is_in_the_span_as_the_first_token(traced):
    make, spans = traced
    api = make(answer("why</think>yes", pause=0.0))
    api.chat(stream=True)
    assert api.client.bypassed > 1
    (span,) = spans()
    assert [event.name for event in span.events] == ["first_token"]


def test_choices_have_spans_of_their_own(traced):
    make, spans = traced
    make(answer("x")).chat(n=3)
    assert len({span.attributes["flare.request_id"] for span in spans()}) == 3


def test_a_failure_is_an_error_of_the_span(traced):
    make, spans = traced

    def script(request):
        ended = Failed(request.request_id, "rank_failure", "rank 0 died", status=503)
        return [Delta(request.request_id, byte_tokens("a")), ended]

    make(script).chat(stream=True)
    (span,) = spans()
    assert span.attributes["error.type"] == "rank_failure"
    assert not span.status.is_ok
    assert span.end_time


def test_no_text_of_prompt_or_answer_is_in_a_span(traced):
    make, spans = traced
    make(answer("secret answer")).chat(messages=[{"role": "user", "content": "secret prompt"}])
    assert "secret" not in spans()[0].to_json()


def test_without_tracing_streams_stay_as_they_are():
    stream = object()
    assert Tracing().follow(stream, None, {}) is stream


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"flare-ray\[tracing\]"):
        open_tracing("tiny")
