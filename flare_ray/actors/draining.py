"""How an application is told to take no new requests, and says when the open ones have ended
(contract: A4).

Serve ends a deployment by removing its route first: from then on its proxy answers by itself, with
a bare 404, while open responses still run. The command that stops a service therefore asks through
the cluster's key-value store first; HTTP replicas refuse new requests in their own words and report
how many are open; only when none is left is Serve asked to shut down. What is still open at the
limit is ended by the replicas, with an error that says so.
"""

from __future__ import annotations

import enum
import time

import msgspec
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)

from flare_ray.actors.directory import store_namespace

POLL_S = 0.5
"""Seconds between two looks of an HTTP replica, and between two of its reports."""
SETTLED_LOOKS = 3
"""Looks after which a request that had passed the door when it closed is among the open ones."""

_NOTICE_KEY = "flare:drain"
_OPEN_KEY = "flare:open:"


class Stage(enum.IntEnum):
    """What an HTTP replica does with requests."""

    OPEN = 0
    REFUSE_NEW = 1
    END_ALL = 2


class _Notice(msgspec.Struct, frozen=True):
    """Wall-clock seconds at which open requests end, and at which the notice itself does."""

    end_all_s: float
    until_s: float


class OpenRequests(msgspec.Struct, frozen=True):
    """Report of one HTTP replica that drains.

    Attributes:
        count: open requests.
        looks: how often it has looked since it heard of the notice, this time included.
    """

    count: int
    looks: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(OpenRequests).decode
_decode_notice = msgspec.msgpack.Decoder(_Notice).decode


class Drain:
    """The notice of one application. Every method blocks for a call or two to the control service.

    The notice ends by itself, so that one left behind by a command that was killed does not close
    the next application of that name.
    """

    def __init__(self, application: str) -> None:
        self._namespace = store_namespace(application)

    def ask(self, limit_s: float, grace_s: float) -> None:
        """Refuse new requests from now on and end those that are open after `limit_s` seconds;
        holds until `clear`, or `grace_s` seconds beyond the limit."""
        self.clear()
        end_all_s = time.time() + limit_s
        self._put(_NOTICE_KEY, _encode(_Notice(end_all_s, end_all_s + grace_s)))

    def stage(self) -> Stage:
        """What the notice asks for now."""
        raw = _internal_kv_get(_NOTICE_KEY, namespace=self._namespace)
        notice, now_s = None if raw is None else _decode_notice(raw), time.time()
        if notice is None or now_s >= notice.until_s:
            return Stage.OPEN
        return Stage.END_ALL if now_s >= notice.end_all_s else Stage.REFUSE_NEW

    def report(self, replica_id: str, report: OpenRequests) -> None:
        """Say how many requests a replica has open."""
        self._put(_OPEN_KEY + replica_id, _encode(report))

    def reports(self) -> list[OpenRequests]:
        """The last report of each replica that has heard of the notice."""
        keys = _internal_kv_list(_OPEN_KEY, namespace=self._namespace)
        found = [_internal_kv_get(key, namespace=self._namespace) for key in keys]
        return [_decode(raw) for raw in found if raw is not None]

    def drained(self, replicas: int) -> bool:
        """Whether as many replicas have reported, and each has settled with none open."""
        reports = self.reports()
        settled = all(r.count == 0 and r.looks >= SETTLED_LOOKS for r in reports)
        return settled and len(reports) >= replicas

    def clear(self) -> None:
        """Remove the notice and all reports; idempotent."""
        keys: list[str | bytes] = [_NOTICE_KEY]
        keys += _internal_kv_list(_OPEN_KEY, namespace=self._namespace)
        for key in keys:
            _internal_kv_del(key, namespace=self._namespace)

    def _put(self, key: str, value: bytes) -> None:
        _internal_kv_put(key, value, overwrite=True, namespace=self._namespace)
