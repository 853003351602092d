"""An `EngineClient` that answers from a script and keeps account of what was opened and closed."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from flare_ray.contracts.cache import CacheReset, CacheStats, TierStats
from flare_ray.contracts.manifest import SamplingDefaults
from flare_ray.contracts.messages import Delta, Failed, Finished
from flare_ray.contracts.record import TokenScore
from flare_ray.contracts.request import GenerationRequest
from flare_ray.contracts.tiers import Tier
from flare_ray.errors import FlareError, Overloaded
from flare_ray.frontend.client import EngineInfo, StreamEvent

Step = StreamEvent | float | asyncio.Event
"""An event to yield, seconds to sleep, or something to wait for."""
Script = Callable[[GenerationRequest], Sequence[Step]]

INFO = EngineInfo(
    engine_id="engine-1",
    context_tokens=512,
    max_prompt_tokens=400,
    vocab_size=300,
    sampling_defaults=SamplingDefaults(temperature=1.0, top_p=0.95),
)


class FakeStream:
    def __init__(self, client: "FakeEngineClient", request: GenerationRequest) -> None:
        self._client = client
        self.request = request
        self.ended = False
        self.closed = False
        self._bypass: Callable[[Delta], bool] | None = None

    def divert(self, bypass: Callable[[Delta], bool]) -> None:
        if self._client.offers_bypass:
            self._bypass = bypass

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        waits = False
        for step in self._client.script(self.request):
            if isinstance(step, float):
                waits = True
                await asyncio.sleep(step)
            elif isinstance(step, asyncio.Event):
                waits = True
                await step.wait()
            elif isinstance(step, Delta) and waits and self._bypass and self._bypass(step):
                self._client.bypassed += 1
            else:
                waits = False
                self.ended = isinstance(step, Finished | Failed)
                yield step

    async def aclose(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._client.running.discard(self.request.request_id)
        if not self.ended:
            self._client.cancelled.append(self.request.request_id)


class FakeEngineClient:
    """Set `script`, `refusal`, `ready` or `offers_bypass` to choose what happens.

    Deltas behind a pause of a script find their reader waiting; `bypassed` counts those that went
    past it.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.script: Script = script or answer("hello")
        self.refusal: FlareError | None = None
        self.ready = True
        self.requests: list[GenerationRequest] = []
        self.running: set[str] = set()
        self.cancelled: list[str] = []
        self.engine_info = INFO
        self.resets: list[frozenset[Tier]] = []
        self.offers_bypass = True
        self.bypassed = 0

    async def open(self, request: GenerationRequest) -> FakeStream:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        self.running.add(request.request_id)
        return FakeStream(self, request)

    async def info(self) -> EngineInfo:
        if not self.ready:
            raise Overloaded("the engine is starting", retry_after_s=5.0, status=503)
        return self.engine_info

    async def request_info(self) -> EngineInfo:
        return await self.info()

    async def cache(self) -> list[CacheStats]:
        tier = TierStats(
            tier="device",
            snapshots=2,
            used_bytes=2000,
            limit_bytes=8000,
            saved_tokens=300,
            saved_bytes=2600,
            restored_tokens=128,
            restored_bytes=1200,
            evicted_tokens=0,
            evicted_bytes=0,
        )
        return [
            CacheStats(
                engine_id="engine-1",
                queried_tokens=400,
                hit_tokens=128,
                moves=0,
                resets=len(self.resets),
                tiers=(tier,),
            )
        ]

    async def reset_cache(self, tiers: frozenset[Tier]) -> list[CacheReset]:
        self.resets.append(tiers)
        return [CacheReset(engine_id="engine-1", dropped=dict.fromkeys(tiers, 1), in_use=0)]

    async def metrics(self) -> str:
        return "# TYPE up gauge\nup 1\n"


def byte_tokens(text: str | bytes) -> tuple[int, ...]:
    """Token ids of `text` under the tokeniser of `chat_checkpoint`; tags are spelled in bytes."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    place = {c: i for i, c in enumerate(alphabet)}
    data = text.encode() if isinstance(text, str) else text
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(itself)]
    letter = {b: chr(b) for b in itself} | {b: chr(0x100 + i) for i, b in enumerate(others)}
    return tuple(place[letter[b]] for b in data)


def answer(text: str, *, step: int = 3, reason: str = "stop", pause: float | None = None) -> Script:
    """Script that emits `text` in pieces of `step` bytes and ends well; every token is certain."""

    def script(request: GenerationRequest) -> list[Step]:
        tokens = byte_tokens(text)
        steps: list[Step] = []
        for start in range(0, len(tokens), step):
            if pause is not None:
                steps.append(pause)
            piece = tokens[start : start + step]
            sources = bytes(len(piece)) if request.token_sources else b""
            scores = (TokenScore(0.0),) * len(piece) if request.top_logprobs >= 0 else ()
            steps.append(Delta(request.request_id, piece, scores=scores, sources=sources))
        finished = Finished(
            request.request_id, reason, len(request.prompt_tokens), len(tokens) + (reason == "stop")
        )
        return [*steps, finished]

    return script
