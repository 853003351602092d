"""Runs prompts through an engine of this process and collects their output.

Owns how many requests are in flight and who is told of which item; the engine owns everything else.
Many threads may run calls at once: they share the engine's slots fairly by its own queue.

One call: submit while there is room -> take items -> finish requests -> submit the next. Room is
shared by all calls, so that offline use meets the engine's bounded queue without overflowing it; an
overload that happens all the same (few pages) is waited out.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from flare_ray.cli.outputs import RequestOutput, Speculation, StreamOutput, Usage
from flare_ray.config import EngineConfig
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.messages import Delta, Failed, Finished, StreamItem
from flare_ray.contracts.record import TokenScore
from flare_ray.contracts.request import GenerationRequest, SamplingParams
from flare_ray.controller.loop import ControllerStats
from flare_ray.controller.sampling import resolve
from flare_ray.errors import InvalidRequest, Overloaded
from flare_ray.frontend.detokenize import IncrementalDetokenizer
from flare_ray.frontend.stream import failure_error

OVERLOAD_STATUS = 429
"""An overload that passes; 503 is an engine that goes away."""
RETRY_PAUSE_S = 0.02
"""Wait before an overloaded request is offered again: a few rounds, since nobody else competes."""


class Engine(Protocol):
    """The part of `actors.core.EngineCore` that offline generation uses."""

    @property
    def manifest(self) -> PreparedManifest:
        """What was prepared."""

    def submit(self, request: GenerationRequest, on_item: Callable[[StreamItem], None]) -> None:
        """Hand over a request whose items go to `on_item`, called by another thread."""

    def cancel(self, request_id: str) -> None:
        """End a request; unknown ids are no error."""

    def stats(self) -> ControllerStats:
        """Where the controller stands."""

    def shutdown(self, drain_s: float) -> None:
        """Stop everything."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, checked and ready to submit."""

    prompt: str | None
    request: GenerationRequest


class Room:
    """Places for requests in flight, handed out in the order asked; any thread.

    A place is free again when the engine has ended the request, whether or not anyone has read its
    output: one thread may hold many unread streams.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._changed = threading.Condition()
        self._line: deque[object] = deque()

    def take(self, *, wait: bool) -> bool:
        """Take a place; without `wait` False if none is free or others stand in line for it."""
        with self._changed:
            if not wait:
                if self._line or not self._free:
                    return False
                self._free -= 1
                return True
            ticket = object()
            self._line.append(ticket)
            try:
                self._changed.wait_for(lambda: self._free and self._line[0] is ticket)
                self._free -= 1
            finally:
                # Also on Ctrl-C while waiting: the next in line may be free to go.
                self._line.remove(ticket)
                self._changed.notify_all()
            return True

    def give(self) -> None:
        """Give a place back."""
        with self._changed:
            self._free += 1
            self._changed.notify_all()


class Collector:
    """Output of one request as it grows."""

    def __init__(self, job: Job, token_bytes: Sequence[bytes]) -> None:
        self.job = job
        self._detokenizer = IncrementalDetokenizer(token_bytes)
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._scores: list[TokenScore] = []
        self._prompt_scores: tuple[TokenScore, ...] = ()

    def add(self, delta: Delta) -> StreamOutput:
        """Append newly visible tokens."""
        self._scores += delta.scores
        if delta.prompt_scores:
            self._prompt_scores = delta.prompt_scores
        text = self._detokenizer.push(delta.tokens, trim_bytes=delta.trim_bytes)
        self._text.append(text)
        self._tokens += delta.tokens
        return StreamOutput(text=text, token_ids=delta.tokens)

    def finish(self, item: Finished) -> StreamOutput:
        """The last part, which carries the whole generation."""
        rest = self._detokenizer.finish()
        self._text.append(rest)
        request = self.job.request
        output = RequestOutput(
            prompt=self.job.prompt,
            prompt_token_ids=self.job.request.prompt_tokens,
            text="".join(self._text),
            token_ids=tuple(self._tokens),
            logprobs=tuple(self._scores) if request.top_logprobs >= 0 else None,
            prompt_logprobs=(None, *self._prompt_scores) if request.prompt_logprobs >= 0 else None,
            finish_reason=item.reason,
            stop_reason=item.stop_reason,
            usage=Usage(prompt_tokens=item.prompt_tokens, completion_tokens=item.completion_tokens),
            speculation=Speculation(
                rounds=item.rounds,
                drafts_offered=item.drafts_offered,
                drafts_accepted=item.drafts_accepted,
            ),
        )
        return StreamOutput(text=rest, token_ids=(), finished=output)


class Runner:
    """Generation on one engine; any thread.

    Args:
        token_bytes: text bytes by token id.
        config: the engine's settings; concurrency and queue bound how much is in flight.
    """

    def __init__(
        self, engine: Engine, token_bytes: Sequence[bytes], *, config: EngineConfig
    ) -> None:
        self.engine = engine
        self.token_bytes = token_bytes
        self._max_prompt_tokens = config.admission.max_prompt_tokens
        # Enough waiting requests to fill every slot again the moment it is free.
        waiting = min(config.admission.max_waiting, config.concurrency)
        self.room = Room(config.concurrency + waiting)
        self._numbers = itertools.count()

    def job(self, prompt: str | None, token_ids: Sequence[int], params: SamplingParams) -> Job:
        """Check one prompt and its parameters against the engine.

        Raises:
            InvalidRequest: the prompt is empty, too long or holds an unknown token id, or a
                parameter is out of its range.
        """
        manifest = self.engine.manifest
        count = len(token_ids)
        if count == 0:
            raise InvalidRequest("the prompt is empty: give at least one token", param="prompt")
        limit = self._max_prompt_tokens
        if limit is not None and count > limit:
            raise InvalidRequest(
                f"the prompt has {count} tokens, admission.max_prompt_tokens is {limit}",
                param="prompt",
                code="context_length_exceeded",
            )
        wrong = next((t for t in token_ids if not 0 <= t < manifest.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(
                f"prompt token ids must lie in 0..{manifest.vocab_size - 1}, got {wrong}",
                param="prompt",
            )
        resolved = resolve(
            params,
            manifest.sampling_defaults,
            vocab_size=manifest.vocab_size,
            prompt_tokens=count,
            context_tokens=manifest.context_tokens,
        )
        request = GenerationRequest(
            request_id=f"offline-{next(self._numbers)}",
            prompt_tokens=tuple(token_ids),
            sampling=resolved.sampling,
            max_tokens=resolved.max_tokens,
            stop=resolved.stop,
            include_stop=resolved.include_stop,
            stop_token_ids=resolved.stop_token_ids,
            ignore_eos=resolved.ignore_eos,
            stop_sequences=resolved.stop_sequences,
            top_logprobs=resolved.top_logprobs,
            prompt_logprobs=resolved.prompt_logprobs,
            grammar=resolved.grammar,
        )
        return Job(prompt, request)

    def run(self, jobs: Sequence[Job]) -> list[RequestOutput]:
        """Outputs in the order of `jobs`.

        Raises:
            FlareError: a request failed; the others of this call are cancelled.
            KeyboardInterrupt: likewise.
        """
        outputs: dict[str, RequestOutput] = {}
        for job, part in _Call(self, jobs).items():
            if part.finished is not None:
                outputs[job.request.request_id] = part.finished
        return [outputs[job.request.request_id] for job in jobs]

    def stream(self, job: Job) -> Iterator[StreamOutput]:
        """Parts of one output as they become visible; closing the iterator cancels it."""
        for _, part in _Call(self, (job,)).items():
            if part.text or part.token_ids or part.finished is not None:
                yield part


class _Call:
    """One `run` or `stream`: its requests that wait, and those in flight. One thread."""

    def __init__(self, runner: Runner, jobs: Sequence[Job]) -> None:
        self._runner = runner
        self._waiting = deque(jobs)
        self._live: dict[str, Collector] = {}
        self._inbox: queue.SimpleQueue[StreamItem] = queue.SimpleQueue()
        self._resume_s = 0.0

    def items(self) -> Iterator[tuple[Job, StreamOutput]]:
        """Parts of all outputs in order of arrival."""
        try:
            while self._waiting or self._live:
                self._submit()
                item = self._next_item()
                if not isinstance(item, Delta | Finished | Failed):
                    continue
                collector = self._live[item.request_id]
                if isinstance(item, Delta):
                    yield collector.job, collector.add(item)
                    continue
                del self._live[item.request_id]
                if isinstance(item, Finished):
                    yield collector.job, collector.finish(item)
                else:
                    self._failed(collector.job, item)
        finally:
            # Not empty after an error, Ctrl-C or an iterator closed early.
            for request_id in self._live:
                self._runner.engine.cancel(request_id)

    def _submit(self) -> None:
        """Submit what there is room for; block for room only with nothing in flight."""
        room = self._runner.room
        while self._waiting and time.monotonic() >= self._resume_s:
            if not room.take(wait=not self._live):
                return
            job = self._waiting.popleft()
            self._live[job.request.request_id] = Collector(job, self._runner.token_bytes)
            try:
                self._runner.engine.submit(job.request, self._on_item)
            except BaseException as error:
                # The engine has not taken it, so no item will give the place back.
                room.give()
                del self._live[job.request.request_id]
                if not _passes(error):
                    raise
                self._try_again(job)

    def _on_item(self, item: StreamItem) -> None:
        """Runs on the engine's thread."""
        if isinstance(item, Finished | Failed):
            self._runner.room.give()
        self._inbox.put(item)

    def _next_item(self) -> StreamItem | None:
        """The next item; None when an overloaded request may be offered again."""
        pause_s = self._resume_s - time.monotonic()
        if not self._waiting or pause_s <= 0:
            return self._inbox.get()
        try:
            return self._inbox.get(timeout=pause_s)
        except queue.Empty:
            return None

    def _failed(self, job: Job, item: Failed) -> None:
        error = failure_error(item)
        if item.emitted or not _passes(error):
            raise error
        self._try_again(job)

    def _try_again(self, job: Job) -> None:
        self._waiting.appendleft(job)
        self._resume_s = time.monotonic() + RETRY_PAUSE_S


def _passes(error: BaseException) -> bool:
    """Whether waiting may help."""
    return isinstance(error, Overloaded) and error.status == OVERLOAD_STATUS
