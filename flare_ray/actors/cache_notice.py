"""How every engine of an application is told to reset its prefix cache, and says that it has
(contract: M7).

A Serve handle reaches some engine, a reset concerns all: the HTTP replica that is asked leaves a
notice in the cluster's key-value store, and each engine answers it beside its report of each
second.
"""

from __future__ import annotations

import secrets
import time

import msgspec
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from flare_ray.actors.directory import store_namespace
from flare_ray.contracts.cache import CacheReset
from flare_ray.contracts.tiers import Tier

NOTICE_S = 60.0
"""Age at which a notice no longer counts: an engine that starts later has nothing to forget."""

_NOTICE_KEY = "flare:reset"
_DONE_KEY = "flare:reset-done:"


class ResetNotice(msgspec.Struct, frozen=True):
    """A reset that every engine is asked for.

    Attributes:
        time_s: wall-clock seconds when it was written.
    """

    notice_id: str
    tiers: tuple[str, ...]
    time_s: float


class ResetDone(msgspec.Struct, frozen=True):
    """An engine's answer."""

    notice_id: str
    reset: CacheReset


_encode = msgspec.msgpack.Encoder().encode
_decode_notice = msgspec.msgpack.Decoder(ResetNotice).decode
_decode_done = msgspec.msgpack.Decoder(ResetDone).decode


class CacheNotice:
    """The notice of one application. Every method blocks for a call to the control service."""

    def __init__(self, application: str) -> None:
        self._namespace = store_namespace(application)

    def ask(self, tiers: frozenset[Tier]) -> str:
        """Leave a notice; its id."""
        notice = ResetNotice(secrets.token_hex(8), tuple(sorted(tiers)), time.time())
        self._put(_NOTICE_KEY, _encode(notice))
        return notice.notice_id

    def asked(self, seen: str) -> ResetNotice | None:
        """The present notice, None if there is none of late or it is the one of id `seen`."""
        raw = _internal_kv_get(_NOTICE_KEY, namespace=self._namespace)
        notice = None if raw is None else _decode_notice(raw)
        if notice is None or notice.notice_id == seen or notice.time_s < time.time() - NOTICE_S:
            return None
        return notice

    def answer(self, engine_id: str, notice: ResetNotice, reset: CacheReset) -> None:
        """Say that an engine has done what was asked."""
        self._put(_DONE_KEY + engine_id, _encode(ResetDone(notice.notice_id, reset)))

    def done(self, engine_id: str, notice_id: str) -> CacheReset | None:
        """What an engine forgot upon a notice, None until it has answered."""
        raw = _internal_kv_get(_DONE_KEY + engine_id, namespace=self._namespace)
        done = None if raw is None else _decode_done(raw)
        return done.reset if done is not None and done.notice_id == notice_id else None

    def _put(self, key: str, value: bytes) -> None:
        _internal_kv_put(key, value, overwrite=True, namespace=self._namespace)
