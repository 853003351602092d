"""Runs conversations against one endpoint, as an arrival process says.

A conversation's turns follow each other; different conversations overlap. Every request's times
count from its intended start: in an open loop that is fixed in advance, so a server that stalls is
charged with the wait it causes to whoever should have come meanwhile (coordinated omission).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from flare_ray.workload.arrivals import Arrivals
from flare_ray.workload.endpoints import Endpoint, EndpointError, Reply, Request

Session = Sequence[Request]


@dataclass(frozen=True, slots=True)
class Timed:
    """One request as it went; times on the clock of `time.perf_counter`.

    Attributes:
        intended_s: when it should have begun; sent_s: when it did.
        reply: None where it failed; then `error` says why.
        cpu_s: CPU time of this process meanwhile.
    """

    request: Request
    intended_s: float
    sent_s: float
    ended_s: float
    cpu_s: float
    reply: Reply | None
    error: str = ""


OnTimed = Callable[[Timed], None]


def drive(
    endpoint: Endpoint,
    sessions: Sequence[Session],
    arrivals: Arrivals,
    *,
    seed: int,
    on_timed: OnTimed,
) -> None:
    """Run all conversations; returns when the last has ended.

    Args:
        on_timed: told of each request, one at a time, from other threads.
    """
    lock = threading.Lock()

    def told(timed: Timed) -> None:
        with lock:
            on_timed(timed)

    if arrivals.is_open:
        _open_loop(endpoint, sessions, arrivals.starts_s(len(sessions), seed=seed), told)
    else:
        _closed_loop(endpoint, sessions, arrivals.lanes, told)


def _closed_loop(
    endpoint: Endpoint, sessions: Sequence[Session], lanes: int, told: OnTimed
) -> None:
    def begin(session: Session) -> None:
        _converse(endpoint, session, time.perf_counter(), told)

    with ThreadPoolExecutor(lanes) as pool:
        list(pool.map(begin, sessions))  # raises what a conversation raised


def _open_loop(
    endpoint: Endpoint, sessions: Sequence[Session], starts_s: Sequence[float], told: OnTimed
) -> None:
    # A thread each, made in advance: an arrival never waits for another one's end.
    with ThreadPoolExecutor(len(sessions) or 1) as pool:
        origin_s = time.perf_counter() + 0.01
        futures = []
        for session, start_s in zip(sessions, starts_s, strict=True):
            pause_s = origin_s + start_s - time.perf_counter()
            if pause_s > 0:
                time.sleep(pause_s)
            futures.append(pool.submit(_converse, endpoint, session, origin_s + start_s, told))
        for future in futures:
            future.result()


def _converse(endpoint: Endpoint, session: Session, intended_s: float, told: OnTimed) -> None:
    """All turns; each is intended for the moment at which the one before it has ended."""
    for request in session:
        timed = _timed(endpoint, request, intended_s)
        told(timed)
        intended_s = timed.ended_s


def _timed(endpoint: Endpoint, request: Request, intended_s: float) -> Timed:
    sent_s, cpu_s = time.perf_counter(), time.process_time()
    reply, error = None, ""
    try:
        reply = endpoint.ask(request)
    except EndpointError as failure:
        error = str(failure)
    ended_s = reply.ended_s if reply is not None else time.perf_counter()
    spent_s = time.process_time() - cpu_s
    return Timed(request, intended_s, sent_s, ended_s, spent_s, reply, error)
