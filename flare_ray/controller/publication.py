"""What consumers are told: one tuple of items per reply address and round (channel (b)).

Guarantees, per request: `Admitted` or `Failed` comes first; after `Finished` or `Failed` nothing
comes. Per address with open requests: a `Heartbeat` at least every HEARTBEAT_S. Also the place
where latencies are measured, at hand-over.
"""

from __future__ import annotations

from flare_ray.contracts.messages import Admitted, Delta, Failed, Finished, Heartbeat, StreamItem
from flare_ray.controller.live import LiveRequest
from flare_ray.controller.ports import OutputPort
from flare_ray.controller.stops import End, Visible
from flare_ray.metrics import names
from flare_ray.metrics.recorder import Recorder

HEARTBEAT_S = 2.0
_NS = 1e9


class Publisher:
    """Collects a round's items and hands them over in one call per address."""

    def __init__(self, output: OutputPort, recorder: Recorder) -> None:
        self._output = output
        self._recorder = recorder
        self._items: dict[str, list[StreamItem]] = {}
        self._open: dict[str, int] = {}
        self._next_heartbeat_ns = recorder.clock() + int(HEARTBEAT_S * _NS)
        self._first_token = recorder.histogram(names.TIME_TO_FIRST_TOKEN)
        self._inter_token = recorder.histogram(names.INTER_TOKEN_LATENCY)
        self._per_token = recorder.histogram(names.TIME_PER_OUTPUT_TOKEN)
        self._end_to_end = recorder.histogram(names.END_TO_END)
        self._generated = recorder.counter(names.GENERATION_TOKENS)
        self._request_generated = recorder.histogram(names.REQUEST_GENERATION_TOKENS)

    @property
    def next_heartbeat_ns(self) -> int:
        """Clock reading at which the next heartbeat is due."""
        return self._next_heartbeat_ns

    def expects(self, live: LiveRequest) -> None:
        """A request waits beside the queue: its consumer gets heartbeats, nothing else."""
        address = live.request.reply_to
        self._open[address] = self._open.get(address, 0) + 1

    def expects_no_more(self, live: LiveRequest) -> None:
        """It waits no longer."""
        self._close(live)

    def admitted(self, live: LiveRequest) -> None:
        """First item of an accepted request."""
        address = live.request.reply_to
        self._open[address] = self._open.get(address, 0) + 1
        self._add(live, Admitted(live.request.request_id))
        self._recorder.counter(names.REQUESTS_ADMITTED).add()

    def refused(self, live: LiveRequest, failure: Failed) -> None:
        """Only item of a request that was not accepted."""
        self._count_failure(failure.code)
        self._add(live, failure)

    def prompt_scored(self, live: LiveRequest) -> None:
        """Scores of the whole prompt, before anything else becomes visible."""
        scores = tuple(live.prompt_scores)
        self._add(live, Delta(live.request.request_id, (), prompt_scores=scores))

    def visible(self, live: LiveRequest, visible: Visible, now_ns: int) -> None:
        """New output, if any is visible."""
        if not visible.tokens:
            return
        # Tokens become visible in the order in which they were generated.
        scores = tuple(live.scores.popleft() for _ in visible.tokens) if live.scores else ()
        sources = bytes(live.sources.popleft() for _ in visible.tokens) if live.sources else b""
        name, trim = live.request.request_id, visible.trim_bytes
        self._add(live, Delta(name, visible.tokens, trim, scores, sources=sources))
        if live.emitted:
            self._inter_token.observe((now_ns - live.last_delivery_ns) / _NS)
        else:
            live.emitted = True
            live.first_token_ns = now_ns
            self._first_token.observe((now_ns - live.arrival_ns) / _NS)
        live.last_delivery_ns = now_ns

    def finished(self, live: LiveRequest, end: End, now_ns: int) -> None:
        """Last item of a request that ended well."""
        # Everything before the ender is visible, and has taken its scores along.
        scored = end.ender is not None and bool(live.scores)
        item = Finished(
            request_id=live.request.request_id,
            reason=end.reason,
            prompt_tokens=len(live.request.prompt_tokens),
            completion_tokens=end.completion_tokens,
            stop_reason=end.stop_reason,
            drafts_offered=live.drafts_offered,
            drafts_accepted=live.drafts_accepted,
            rounds=live.rounds,
            cached_tokens=live.cached_tokens,
            copies_offered=live.copies_offered,
            copies_accepted=live.copies_accepted,
            predicted_offered=live.predicted_offered,
            predicted_accepted=live.predicted_accepted,
            ender=-1 if end.ender is None else end.ender,
            ender_score=live.scores[0] if scored else None,
        )
        self._add(live, item)
        self._close(live)
        self._recorder.counter(names.REQUESTS_FINISHED, end.reason).add()
        self._end_to_end.observe((now_ns - live.arrival_ns) / _NS)
        self._request_generated.observe(end.completion_tokens)
        if end.completion_tokens > 1 and live.first_token_ns:
            gaps = end.completion_tokens - 1
            self._per_token.observe((now_ns - live.first_token_ns) / _NS / gaps)

    def failed(self, live: LiveRequest, failure: Failed) -> None:
        """Last item of an accepted request that ended with an error."""
        self._count_failure(failure.code)
        self._add(live, failure)
        self._close(live)

    def generated(self, tokens: int) -> None:
        """Count tokens that belong to an output, hidden ones included."""
        self._generated.add(tokens)

    def flush(self, now_ns: int, rounds: int) -> bool:
        """Hand everything over; whether there was anything."""
        if now_ns >= self._next_heartbeat_ns:
            self._next_heartbeat_ns = now_ns + int(HEARTBEAT_S * _NS)
            for address in self._open:
                # A consumer in this process shares its fate and needs no sign of life.
                if address:
                    self._items.setdefault(address, []).append(Heartbeat(rounds))
        if not self._items:
            return False
        pending, self._items = self._items, {}
        for address, items in pending.items():
            self._output.send(address, tuple(items))
        return True

    def _add(self, live: LiveRequest, item: StreamItem) -> None:
        self._items.setdefault(live.request.reply_to, []).append(item)

    def _close(self, live: LiveRequest) -> None:
        address = live.request.reply_to
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]

    def _count_failure(self, code: str) -> None:
        self._recorder.counter(names.REQUESTS_FAILED, code).add()
