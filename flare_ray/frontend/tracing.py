"""OpenTelemetry spans of generations, off unless the deployment asks for them (contract: A5).

One span a choice, from its admission to its last token, below the caller's own span where the
request carries a `traceparent`. Where spans go is said by the standard OTEL_* variables of the HTTP
replicas (OTEL_EXPORTER_OTLP_ENDPOINT and its kin). No text and no token is in them.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from flare_ray.contracts.messages import Delta, Failed, Finished
from flare_ray.contracts.request import GenerationRequest
from flare_ray.errors import ConfigError
from flare_ray.frontend.client import RequestStream, StreamEvent

SERVICE = "flare-ray"
SPAN = "generate"


class Tracing:
    """Makes spans; without a tracer it makes none.

    Args:
        tracer: an OpenTelemetry tracer.
        model_name: what spans say the model is.
    """

    def __init__(self, tracer: Any = None, *, model_name: str = "") -> None:
        self._tracer = tracer
        self._model_name = model_name

    def follow(
        self, stream: RequestStream, request: GenerationRequest, headers: Mapping[str, str]
    ) -> RequestStream:
        """The stream of an admitted request, under a span of its own that ends with it."""
        if self._tracer is None:
            return stream
        from opentelemetry import propagate, trace

        span = self._tracer.start_span(
            SPAN,
            context=propagate.extract(dict(headers)),
            kind=trace.SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": SPAN,
                "gen_ai.request.model": self._model_name,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.usage.input_tokens": len(request.prompt_tokens),
                "flare.request_id": request.request_id,
            },
        )
        return TracedStream(stream, span)


class TracedStream:
    """A stream that writes what happens into a span."""

    def __init__(self, stream: RequestStream, span: Any) -> None:
        self._stream = stream
        self._span = span
        self._begun = False
        self._has_ended = False

    def divert(self, bypass: Callable[[Delta], bool]) -> None:
        """See `RequestStream.divert`."""

        def traced(delta: Delta) -> bool:
            taken = bypass(delta)
            if taken:
                self._begin()
            return taken

        self._stream.divert(traced)

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        async for event in self._stream:
            if isinstance(event, Delta):
                self._begin()
            else:
                self._has_ended = True
                self._tell(event)
            yield event

    async def aclose(self) -> None:
        """See `RequestStream.aclose`; ends the span."""
        await self._stream.aclose()
        if self._span.is_recording():
            if not self._has_ended:
                self._span.add_event("cancelled")
            self._span.end()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._span.add_event("first_token")

    def _tell(self, end: Finished | Failed) -> None:
        if isinstance(end, Failed):
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", end.code)
            self._span.set_status(StatusCode.ERROR, end.message)
            return
        self._span.set_attributes(
            {
                "gen_ai.usage.output_tokens": end.completion_tokens,
                "gen_ai.response.finish_reasons": (end.reason,),
                "flare.cached_tokens": end.cached_tokens,
                "flare.rounds": end.rounds,
                "flare.drafts_offered": end.drafts_offered,
                "flare.drafts_accepted": end.drafts_accepted,
            }
        )


def open_tracing(model_name: str) -> Tracing:
    """Tracing with the exporter that the OTEL_* variables describe.

    Raises:
        ConfigError: the packages of the `tracing` extra are missing.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"ingress.tracing needs the tracing extra ({error}); pip install 'flare-ray[tracing]' "
            "or set it to false"
        ) from error
    name = os.environ.get("OTEL_SERVICE_NAME") or SERVICE
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider.get_tracer(SERVICE), model_name=model_name)
