"""Engines of one application in the cluster's key-value store: who they are, how they fare.

A Serve handle reaches *some* engine; `/metrics`, the output stream and readiness concern *every*
one (contract: A5). Each engine therefore writes two records, one at its start (identity, secret,
manifest) and one a second (metrics, load); any ingress replica reads them all. Records of an engine
that was killed go stale and are ignored, later removed.

The store lies in the cluster's control service, which already trusts every process that may reach
it; the secret guards the ZeroMQ port against processes that may not.
"""

from __future__ import annotations

import time

import msgspec
from ray._private import state
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)

from flare_ray.contracts.cache import CacheStats
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.metrics.recorder import Snapshot

BEAT_S = 1.0
"""Seconds between two reports of an engine."""
STALE_S = 10.0
"""Age at which a report no longer counts; generous, since it is compared across nodes' clocks."""
REMOVE_S = 120.0
"""Age at which another engine's start removes what a killed one left."""
ALIVE = "ALIVE"
"""State of a running actor in Ray's actor table."""

_ENGINE_KEY = "flare:engine:"
_METRICS_KEY = "flare:metrics:"


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is; constant from its readiness to its end.

    Attributes:
        secret: start-up secret that its stream batches carry.
        actor_id: hexadecimal id of the actor it runs in.
        max_prompt_tokens: longest prompt accepted.
        started_s: wall-clock seconds of its readiness.
    """

    engine_id: str
    secret: bytes
    actor_id: str
    manifest: PreparedManifest
    max_prompt_tokens: int
    started_s: float


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine fares.

    Attributes:
        time_s: wall-clock seconds when it was taken.
        ready: it takes requests.
        running / waiting: live requests with and without a slot.
        cache: its prefix cache.
    """

    engine_id: str
    time_s: float
    ready: bool
    running: int
    waiting: int
    free_pages: int
    total_pages: int
    metrics: Snapshot
    cache: CacheStats | None = None


_decode_record = msgspec.msgpack.Decoder(EngineRecord).decode
_decode_report = msgspec.msgpack.Decoder(EngineReport).decode
_encode = msgspec.msgpack.Encoder().encode


def store_namespace(application: str) -> str:
    """Namespace of an application in the cluster's key-value store."""
    # The store splits namespace and key at the first colon.
    return "flare-" + application.replace(":", "-")


class EngineDirectory:
    """The records of one application. Every method is one or two calls (about 0.5 ms each) to the
    control service and blocks for them: call it from a thread where an event loop must go on."""

    def __init__(self, application: str) -> None:
        self._namespace = store_namespace(application)

    def publish(self, record: EngineRecord) -> None:
        """Announce an engine."""
        self._put(_ENGINE_KEY + record.engine_id, _encode(record))

    def report(self, report: EngineReport) -> None:
        """Replace an engine's report."""
        self._put(_METRICS_KEY + report.engine_id, _encode(report))

    def withdraw(self, engine_id: str) -> None:
        """Remove what an engine wrote; idempotent."""
        for prefix in (_ENGINE_KEY, _METRICS_KEY):
            _internal_kv_del(prefix + engine_id, namespace=self._namespace)

    def engine(self, engine_id: str) -> EngineRecord | None:
        """The record of one engine, None if it has none."""
        raw = _internal_kv_get(_ENGINE_KEY + engine_id, namespace=self._namespace)
        return None if raw is None else _decode_record(raw)

    def alive(self, record: EngineRecord) -> bool:
        """Whether the cluster knows of no end of the engine's process; it learns of a killed one
        within a fraction of a second, long before the engine's reports are missed."""
        return state.actors(actor_id=record.actor_id).get("State") == ALIVE

    def engines(self) -> list[EngineRecord]:
        """Engines with a fresh report that take requests, by id."""
        ready = [report.engine_id for report in self.reports() if report.ready]
        return [record for name in ready if (record := self.engine(name)) is not None]

    def reports(self) -> list[EngineReport]:
        """Fresh reports, by engine id."""
        oldest_s = time.time() - STALE_S
        return [report for report in self._all_reports() if report.time_s >= oldest_s]

    def sweep(self) -> None:
        """Remove the records of engines that ended without withdrawing them."""
        oldest_s = time.time() - REMOVE_S
        for report in self._all_reports():
            if report.time_s < oldest_s:
                self.withdraw(report.engine_id)

    def _all_reports(self) -> list[EngineReport]:
        keys = sorted(_internal_kv_list(_METRICS_KEY, namespace=self._namespace))
        # A record may vanish between the listing and the reading.
        found = [_internal_kv_get(key, namespace=self._namespace) for key in keys]
        return [_decode_report(raw) for raw in found if raw is not None]

    def _put(self, key: str, value: bytes) -> None:
        _internal_kv_put(key, value, overwrite=True, namespace=self._namespace)
