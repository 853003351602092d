"""An engine of this process whose prefix cache is measured, one request at a time."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.failure import BenchmarkFailure
from flare_ray.actors.core import EngineCore
from flare_ray.actors.inprocess import start_inprocess
from flare_ray.config import EngineConfig
from flare_ray.contracts.cache import CacheStats
from flare_ray.contracts.messages import Delta, Failed, Finished, StreamItem
from flare_ray.contracts.request import GenerationRequest, SamplingSpec
from flare_ray.contracts.tiers import Tier

REQUEST_LIMIT_S = 120.0
REST_LIMIT_S = 30.0
GREEDY = SamplingSpec(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, seed=0)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request.

    Attributes:
        tokens: the output.
        cached_tokens: prompt tokens that were restored.
        drafts: offered and accepted ones. Equal texts and drafts mean equal rounds.
        first_s: submission to first token.
        cpu_s: CPU time of the engines' threads from the first token until nothing moves any more;
            the thread that measures is left out, since it polls.
    """

    tokens: tuple[int, ...]
    cached_tokens: int
    drafts: tuple[int, int]
    first_s: float
    cpu_s: float


class LocalPrefixEngine:
    """See the module. Ended by leaving its context."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._core: EngineCore = start_inprocess(EngineConfig.model_validate(settings))
        cache = settings["prefix_cache"]
        self._disk_path = cache.get("disk_path")
        self._keeps = cache.get("enabled", True)
        self._number = 0

    def __enter__(self) -> LocalPrefixEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._core.shutdown(0.0)

    @property
    def row_bytes(self) -> int:
        """Of one snapshot on one rank, its pages apart."""
        return self._core.manifest.snapshot_row_bytes

    def tokens(self, count: int, *, seed: int) -> tuple[int, ...]:
        """Random token ids that are no control tokens of any checkpoint served here."""
        rng = random.Random(seed)
        top = min(self._core.manifest.vocab_size, 256) - 32
        return tuple(rng.randrange(3, top) for _ in range(count))

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Run one request, greedy, to its full length."""
        self._number += 1
        ended = threading.Event()
        tokens: list[int] = []
        firsts: list[tuple[float, float]] = []
        ends: list[Finished | Failed] = []

        def note(item: StreamItem) -> None:
            if isinstance(item, Delta):
                if not firsts:
                    firsts.append((time.perf_counter(), time.process_time()))
                tokens.extend(item.tokens)
            elif isinstance(item, Finished | Failed):
                ends.append(item)
                ended.set()

        request = GenerationRequest(
            request_id=f"prefix-{self._number}",
            prompt_tokens=tuple(prompt),
            sampling=GREEDY,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        started_s = time.perf_counter()
        self._core.submit(request, note)
        own_s = time.thread_time()
        if not ended.wait(REQUEST_LIMIT_S):
            raise BenchmarkFailure(f"a request did not end within {REQUEST_LIMIT_S:.0f} s")
        if isinstance(ends[0], Failed):
            raise BenchmarkFailure(f"a request failed: {ends[0].message}")
        self.rest()
        first_s, first_cpu_s = firsts[0]
        end = ends[0]
        return Answer(
            tokens=tuple(tokens),
            cached_tokens=end.cached_tokens,
            drafts=(end.drafts_offered, end.drafts_accepted),
            first_s=first_s - started_s,
            cpu_s=time.process_time() - first_cpu_s - (time.thread_time() - own_s),
        )

    def first_token(self, prompt: Sequence[int], *, cached: int) -> float:
        """Seconds to the first token.

        Raises:
            BenchmarkFailure: another number of tokens was restored than `cached`.
        """
        answer = self.answer(prompt, 1)
        if answer.cached_tokens != cached:
            raise BenchmarkFailure(
                f"{answer.cached_tokens} tokens were restored, expected {cached}"
            )
        return answer.first_s

    def decode(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Run one request whose prompt no tier holds."""
        if self._keeps:
            self.reset("device", "host", "disk")
        return self.answer(prompt, max_tokens)

    def reset(self, *tiers: str) -> None:
        """Forget what some tiers hold, and wait until it is gone."""
        self.rest()
        self._core.reset_cache(frozenset(map(Tier, tiers)))
        self.rest()

    def rest(self) -> None:
        """Wait until nothing moves between tiers.

        Raises:
            BenchmarkFailure: it does not come to rest.
        """
        deadline_s = time.monotonic() + REST_LIMIT_S
        while self._core.cache_stats().moves:
            if time.monotonic() > deadline_s:
                raise BenchmarkFailure("the tiers do not come to rest")
            time.sleep(0.001)

    def drop_page_cache(self) -> None:
        """Have the system forget the content of the disk tier's files, as far as it lets us."""
        for file in Path(self._disk_path or "").rglob("*.part"):
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def stats(self) -> CacheStats:
        """What the cache holds and did."""
        return self._core.cache_stats()


def first_tokens(*engines: LocalPrefixEngine) -> None:
    """First use of everything, and a check that the engines agree."""
    prompt = engines[0].tokens(200, seed=1)
    texts = {engine.answer(prompt, 40).tokens for engine in engines}
    if len(texts) != 1:
        raise BenchmarkFailure("engines of one checkpoint give different texts")
