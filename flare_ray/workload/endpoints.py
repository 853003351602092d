"""What is measured: anything that answers a request and can be timed.

`http.HttpEndpoint` speaks to any OpenAI-compatible server, `engine.EngineEndpoint` to an engine of
this process; benchmarks bring others (a library's `generate`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from flare_ray.errors import FlareError
from flare_ray.metrics.exposition import Exposition
from flare_ray.workload.items import Answer, Item


class EndpointError(FlareError):
    """A request came to no good end; kept as an observation, never dropped."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to run.

    Attributes:
        ids: prompt tokens, where they are known.
        max_tokens: output budget.
        temperature: None = the item's own, which is the checkpoint's default where it has none.
        ignore_eos: run to the budget.
        reproducible: draw by position, so that every arm writes equal text; None = say nothing.
        cache_salt: prefixes are reused among equal salts only; "" = say nothing.
        predict: offer the item's prediction as copied drafts.
    """

    item: Item
    ids: tuple[int, ...] = ()
    max_tokens: int = 16
    temperature: float | None = None
    ignore_eos: bool = False
    reproducible: bool | None = None
    cache_salt: str = ""
    predict: bool = False


@dataclass(slots=True)
class Reply:
    """What came back, and when.

    Attributes:
        chunk_s: clock (`time.perf_counter`) at each delivery that brought output.
        ended_s: the same at the end.
        offered / accepted / copied / copied_accepted / rounds: speculation totals, copies among
            the drafts; -1 = not told.
    """

    answer: Answer = field(default_factory=Answer)
    chunk_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    offered: int = -1
    accepted: int = -1
    copied: int = -1
    copied_accepted: int = -1
    rounds: int = -1


class Endpoint(Protocol):
    """One arm's server. `ask` is called by several threads at once."""

    @property
    def in_process(self) -> bool:
        """Whether this process's CPU time is the work's."""

    def ask(self, request: Request) -> Reply:
        """Run one request to its end.

        Raises:
            EndpointError: it failed.
        """

    def counters(self) -> Exposition | None:
        """The engine's counters; None where the server has none that are known here."""
