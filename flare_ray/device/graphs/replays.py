"""Recordings of programs on CPU, made when a program runs with the same facts for a second time
(`device.ops.replay`): an eager backend at the speed of a captured one.

The first run is plain. It fills whatever operators cache, and most combinations of facts that occur
once do not occur again. Recording costs about as much as a plain run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from flare_ray.device.ops.replay import Pool, Recorded, record
from flare_ray.device.speculation.inputs import HostFacts

T = TypeVar("T")
MOST_RECORDINGS = 128
"""Each holds some thousand Python objects, half a megabyte."""
MOST_MET = 1024
"""Keys remembered as met once."""
FEWEST_COLUMNS = 8
"""Page-table columns in view of any recording, if there are as many. Compiled kernels read visible
entries alone, so a wider view costs them nothing; attention that gathers its view pays for it
(NOTES.md)."""


class _Held(NamedTuple):
    recorded: Recorded[Any]
    after: object


class Replays:
    """The recordings of one rank, the least recently used dropped first. Used by one thread.

    Attributes:
        replayed: the last `run` was a replay.
    """

    def __init__(self) -> None:
        self.replayed = False
        self._pool = Pool()
        self._held: OrderedDict[Hashable, _Held] = OrderedDict()
        self._met: OrderedDict[Hashable, None] = OrderedDict()
        self._results: set[int] = set()

    def __len__(self) -> int:
        """Recordings held."""
        return len(self._held)

    def run(self, key: Hashable, function: Callable[[], T], *, after: object = None) -> T:
        """Run `function`, or replay what it did the second time.

        Args:
            key: says what it does; equal keys must mean equal operators on the same tensors.
            function: as `record` wants it.
            after: what an earlier `run` of this execution returned and `function` reads; it is
                recorded only if that was.
        """
        self.replayed = False
        if after is not None:
            if id(after) not in self._results:
                return function()
            key = (key, id(after))
        held = self._held.get(key)
        if held is not None:
            self._held.move_to_end(key)
            self.replayed = True
            return held.recorded.replay()
        if key not in self._met:
            self._met[key] = None
            if len(self._met) > MOST_MET:
                self._met.popitem(last=False)
            return function()
        del self._met[key]
        recorded = record(function, self._pool)
        # A held object keeps its id, so an equal id in a key is the same object.
        self._held[key] = _Held(recorded, after)
        self._results.add(id(recorded.result))
        self._drop_oldest()
        return recorded.result

    def _drop_oldest(self) -> None:
        while len(self._held) > MOST_RECORDINGS:
            _, old = self._held.popitem(last=False)
            self._results.discard(id(old.recorded.result))


def coarse(facts: HostFacts, columns: int) -> HostFacts:
    """What a recording that serves `facts` is made for: bounds rounded up, so that growing contexts
    and requests of all kinds meet few recordings. Wider bounds change no result.

    Args:
        columns: of the page table.
    """
    filters = facts.filters
    return replace(
        facts,
        context_pages=min(max(_power(facts.context_pages), FEWEST_COLUMNS), columns),
        publishes=True,
        filters=replace(
            filters,
            max_top_k=_power(filters.max_top_k),
            max_rules=_power(filters.max_rules),
            max_bad_words=_power(filters.max_bad_words),
        ),
    )


def _power(bound: int) -> int:
    """The power of two at or above a bound; 0 and 1 mean something of their own."""
    return bound if bound < 2 else 1 << (bound - 1).bit_length()
