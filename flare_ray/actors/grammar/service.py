"""`GrammarService`: a cache of compiled grammars, threads that wait for compiling processes, and
the blocks in which masks travel (contract: K1).

The library is imported and a process started with the first constrained request, or with the engine
(`grammar.preload`). A second process takes over while the first one is busy, so that a slow grammar
does not hold quick ones.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from flare_ray.actors.grammar.process import CompileLimits, CompileProcess
from flare_ray.actors.masks import MaskBlock
from flare_ray.actors.vocabulary import grammar_token_bytes
from flare_ray.config import EngineConfig, GrammarConfig
from flare_ray.contracts.grammar import GrammarSpec
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.controller.grammar.gate import PARAM, unavailable
from flare_ray.controller.grammar.matcher import MaskFrame, OnCompiled
from flare_ray.controller.grammar.utf8 import Utf8Masks
from flare_ray.errors import InvalidRequest, Overloaded

if TYPE_CHECKING:
    from flare_ray.actors.grammar.xgrammar import Compiled, Vocabulary

logger = logging.getLogger("ray.serve.flare")

PROCESSES = 2
FRAMES = 2
"""Mask blocks: as many as rounds can be unanswered (contract: T6)."""
MAX_REFUSED = 256
STOP_LIMIT_S = 5.0
_encode = msgspec.msgpack.Encoder().encode


def is_installed() -> bool:
    """Whether the library can be imported; imports nothing."""
    return importlib.util.find_spec("xgrammar") is not None


class CompilingService:
    """See `GrammarService`.

    Args:
        manifest: the engine's; it must have terminal tokens.
        table: bytes by token id, tags of the chat format with their text.
    """

    def __init__(
        self, manifest: PreparedManifest, table: Sequence[bytes], config: GrammarConfig
    ) -> None:
        self._table = tuple(table[: manifest.vocab_size])
        self._eos_ids = manifest.eos_ids
        self._config = config
        self._rows = manifest.slots * (manifest.draft_tokens + 1)
        self._blocks: list[MaskBlock] = []
        self._frames: list[MaskFrame] = []
        self._condition = threading.Condition()
        self._orders: deque[tuple[bytes, GrammarSpec]] = deque()
        self._waiting: dict[bytes, list[OnCompiled]] = {}
        self._cache: OrderedDict[bytes, Compiled] = OrderedDict()
        self._refused: OrderedDict[bytes, InvalidRequest] = OrderedDict()
        self._cached_bytes = 0
        self._busy = 0
        self._closed = False
        self._library_lock = threading.Lock()
        self._library: tuple[Vocabulary, Utf8Masks] | None = None
        limits = CompileLimits(config.compile_timeout_s, config.compile_memory_bytes)
        self._processes = [
            CompileProcess(self._table, self._eos_ids, limits) for _ in range(PROCESSES)
        ]
        self._threads = [
            threading.Thread(
                target=self._run, args=(place,), name=f"flare-grammar-{place}", daemon=True
            )
            for place in range(PROCESSES)
        ]
        for thread in self._threads:
            thread.start()

    def compile(self, spec: GrammarSpec, done: OnCompiled) -> None:
        """See `GrammarService`."""
        encoded = _encode(spec)
        if len(encoded) > self._config.max_source_bytes:
            done(
                InvalidRequest(
                    f"the grammar has {len(encoded)} bytes, at most "
                    f"{self._config.max_source_bytes}; make it smaller",
                    param=PARAM,
                    code="invalid_grammar",
                )
            )
            return
        key = hashlib.sha256(encoded).digest()
        with self._condition:
            known = self._refused.get(key) or self._cache.get(key)
            if key in self._cache:
                self._cache.move_to_end(key)
            if known is None and not self._closed:
                if key not in self._waiting:
                    self._orders.append((key, spec))
                    self._condition.notify_all()
                self._waiting.setdefault(key, []).append(done)
                return
        done(known or _closing())

    def refuse(self, spec: GrammarSpec, refusal: InvalidRequest) -> None:
        """See `GrammarService`. The oldest of MAX_REFUSED may be tried again."""
        key = hashlib.sha256(_encode(spec)).digest()
        with self._condition:
            self._refused[key] = refusal
            if len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)
            dropped = self._cache.pop(key, None)
            if dropped is not None:
                self._cached_bytes -= dropped.num_bytes

    def frame(self, round_id: int) -> MaskFrame:
        """See `GrammarService`."""
        if not self._frames:
            self._blocks = [MaskBlock(self._rows, len(self._table)) for _ in range(FRAMES)]
            self._frames = [MaskFrame(block.name, block.rows) for block in self._blocks]
        return self._frames[round_id % FRAMES]

    def preload(self) -> None:
        """Import the library and start a process; waits for both.

        Raises:
            Overloaded: the process did not start.
        """
        self._load_library()
        self._processes[0].start()

    def close(self) -> None:
        """See `GrammarService`."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            left = [done for waiting in self._waiting.values() for done in waiting]
            self._waiting.clear()
            self._orders.clear()
            self._condition.notify_all()
        for done in left:
            done(_closing())
        for process in self._processes:
            process.kill()
        for thread in self._threads:
            thread.join(STOP_LIMIT_S)
        self._frames = []
        for block in self._blocks:
            block.close()

    def _run(self, place: int) -> None:
        """Thread: take orders; the second one only while the first is busy."""
        while True:
            with self._condition:
                while not self._closed and not (self._orders and self._busy >= place):
                    self._condition.wait()
                if self._closed:
                    return
                key, spec = self._orders.popleft()
                self._busy += 1
                self._condition.notify_all()
            outcome = self._outcome(place, spec)
            with self._condition:
                self._busy -= 1
                waiting = self._waiting.pop(key, [])
                if not isinstance(outcome, InvalidRequest | Overloaded):
                    self._keep(key, outcome)
                self._condition.notify_all()
            for done in waiting:
                done(outcome)

    def _outcome(self, place: int, spec: GrammarSpec) -> Compiled | InvalidRequest | Overloaded:
        try:
            text = self._processes[place].compile(spec)
            vocabulary, utf8 = self._load_library()
            from flare_ray.actors.grammar.xgrammar import Compiled

            compiled = Compiled(text, vocabulary, utf8)
        except InvalidRequest as error:
            error.param = error.param or PARAM
            return error
        except Overloaded as error:
            return error
        except Exception as error:
            logger.exception("a grammar could not be compiled")
            return Overloaded(
                f"the grammar could not be compiled: {error}", retry_after_s=5.0, status=503
            )
        if compiled.num_bytes > self._config.cache_bytes:
            return InvalidRequest(
                f"the compiled grammar has {compiled.num_bytes} bytes, at most "
                f"{self._config.cache_bytes}; make it smaller",
                param=PARAM,
                code="invalid_grammar",
            )
        return compiled

    def _load_library(self) -> tuple[Vocabulary, Utf8Masks]:
        with self._library_lock:
            if self._library is None:
                from flare_ray.actors.grammar.xgrammar import Vocabulary

                self._library = (Vocabulary(self._table, self._eos_ids), Utf8Masks(self._table))
            return self._library

    def _keep(self, key: bytes, compiled: Compiled) -> None:
        """Cache, least recently used out first; requests that run keep theirs alive."""
        self._cache[key] = compiled
        self._cached_bytes += compiled.num_bytes
        while self._cached_bytes > self._config.cache_bytes and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.num_bytes


def _closing() -> Overloaded:
    return Overloaded("the engine is shutting down", retry_after_s=1.0, status=503)


def start_service(
    config: EngineConfig, manifest: PreparedManifest
) -> tuple[CompilingService | None, str]:
    """The service of an engine; or None and why it takes no constrained requests.

    Raises:
        CheckpointError: the tokenizer is missing or malformed.
        Overloaded: `grammar.preload` is set and the compiling process did not start.
    """
    why = unavailable(manifest, enabled=config.grammar.enabled, installed=is_installed())
    if why:
        return None, why
    service = CompilingService(manifest, grammar_token_bytes(config, manifest), config.grammar)
    if config.grammar.preload:
        try:
            service.preload()
        except BaseException:
            service.close()
            raise
    return service, ""
