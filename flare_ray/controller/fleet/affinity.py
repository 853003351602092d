"""Which engine takes a request: the one that holds its prefix, unless it is loaded or not ready.

    keys of the request        of its session, or of the first pages of its prompt; both begin with
                               the cache salt, as the prefix cache's own digests do
    -> known engine            where the deepest known key was sent last (`KnownPrefixes`)
    -> else its home           highest hash of (key, engine) among those ready (rendezvous hashing):
                               every HTTP replica finds the same one, and an engine that comes or
                               goes moves its own share of the keys alone
    -> unless the guard        says that it has too many open requests: the less loaded of two
       passes it over          others taken at random (power of two choices)

Keys say where a prefix may be, never that it is there: what a request reuses is decided by the
engine's cache, salt included.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from flare_ray.contracts.request import GenerationRequest
from flare_ray.contracts.routing import Choice, Route
from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.controller.paging.chain import DIGEST_BYTES, TokenChain

MAX_PAGES = 64
"""Pages of a prompt that make keys: 4,096 tokens, some 0.2 ms. Prompts that begin alike for longer
than that share all their keys; the guard still spreads them."""


def route_of(request: GenerationRequest, *, home_pages: int) -> Route:
    """Where a request belongs.

    Args:
        home_pages: pages of prompt, at most, whose hash names an engine while none is known.
    """
    if request.session:
        salt = hashlib.blake2b(request.cache_salt.encode(), digest_size=DIGEST_BYTES).digest()
        text = request.session.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(salt + text, digest_size=DIGEST_BYTES, person=b"session").digest()
        return Route(keys=(digest,), home=digest)
    pages = min(len(request.prompt_tokens) // PAGE_TOKENS, MAX_PAGES)
    if not pages:
        return Route()
    chain = TokenChain(request.prompt_tokens[: pages * PAGE_TOKENS], request.cache_salt)
    keys = tuple(chain.digest(page) for page in range(1, pages + 1))
    return Route(keys=keys, home=keys[min(pages, home_pages) - 1])


class KnownPrefixes:
    """Which engine got a key last, as far as this HTTP replica has seen; least recently used ones
    are forgotten. Only the deepest key of a request is kept: a later turn of its conversation
    passes it on the way to its own.

    Args:
        limit: keys kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._engines: dict[bytes, str] = {}

    def __len__(self) -> int:
        return len(self._engines)

    def engine_of(self, keys: Sequence[bytes], among: Container[str]) -> str | None:
        """Where the deepest of `keys` that is known was sent, if that engine is among those."""
        for key in reversed(keys):
            name = self._engines.get(key)
            if name is not None and name in among:
                return name
        return None

    def note(self, keys: Sequence[bytes], engine: str) -> None:
        """A request with these keys was sent to `engine`."""
        if not keys:
            return
        self._engines.pop(keys[-1], None)
        self._engines[keys[-1]] = engine
        if len(self._engines) > self._limit:
            del self._engines[next(iter(self._engines))]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the router knows of one engine.

    Attributes:
        open: its open requests, waiting ones included.
        ready: it takes requests.
    """

    name: str
    open: int
    ready: bool = True


@dataclass(frozen=True, slots=True)
class LoadGuard:
    """When an engine is passed over in favour of a less loaded one.

    Attributes:
        factor: open requests over the mean of all ready engines, this request included; >= 1.
        spare: open requests up to which no engine is passed over.
    """

    factor: float
    spare: int

    def admits(self, engine: EngineLoad, ready: Sequence[EngineLoad]) -> bool:
        """Whether `engine` may have one request more."""
        mean = (sum(other.open for other in ready) + 1) / len(ready)
        return engine.open + 1 <= max(self.spare, self.factor * mean)


def choose(
    route: Route,
    engines: Sequence[EngineLoad],
    known: KnownPrefixes,
    guard: LoadGuard,
    dice: random.Random,
) -> tuple[tuple[str, ...], Choice]:
    """The engines, one or two, the less loaded of which takes a request, and why.

    Engines that are not ready are passed over, unless none is: the call then waits for one.

    Args:
        engines: at least one.
    """
    ready = [engine for engine in engines if engine.ready] or list(engines)
    if not route.keys:
        return two_of(ready, dice), Choice.LOAD
    loads = {engine.name: engine for engine in ready}
    name, choice = known.engine_of(route.keys, loads), Choice.KNOWN
    if name is None:
        name, choice = home_of(route.home, loads), Choice.HOME
    if guard.admits(loads[name], ready):
        return (name,), choice
    # A guard of factor >= 1 never passes the only engine over.
    return two_of([engine for engine in ready if engine.name != name], dice), Choice.GUARD


def home_of(key: bytes, names: Iterable[str]) -> str:
    """The engine to which a key hashes, of at least one."""
    return max(names, key=lambda name: (_score(key, name), name))


def two_of(engines: Sequence[EngineLoad], dice: random.Random) -> tuple[str, ...]:
    """Two of the engines at random, or the only one."""
    return tuple(engine.name for engine in dice.sample(engines, min(2, len(engines))))


def _score(key: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), key=key, digest_size=DIGEST_BYTES).digest()
