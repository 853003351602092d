"""The threads that move snapshots beside rounds: order, streams, page-locked memory (contract: M7).

What only CUDA has is stood in for, so that the order of its calls is proven on any machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading

import pytest
import torch

from flare_ray.contracts.tiers import TierFault, TierMove, TierOrder, TierReport
from flare_ray.device.state import snapshot_host
from flare_ray.device.state.snapshot_host import Content, SnapshotArena
from flare_ray.device.state.staging import Staging
from flare_ray.device.state.store import StateStore
from tests.support.tier_writer import ARENA_BYTES, LIMITS, SPEC, make_arena

WAIT_S = 20.0
TOKENS = 70


class Line:
    """A rank's staging whose reports are collected."""

    def __init__(self, arena: SnapshotArena, device: str = "cpu") -> None:
        self.loaded: list[int] = []
        self.reports: queue.SimpleQueue[TierReport] = queue.SimpleQueue()
        self.staging = Staging(arena, 0, device, lambda order: self.loaded.append(order.ticket))

    def begin(self, ticket: int, move: TierMove, **fields) -> None:
        fields = {"entry": 1, "tokens": TOKENS, "row": 0, "pages": (1, 2), **fields}
        self.staging.begin(TierOrder(ticket, move, **fields), self.reports.put)

    def report(self) -> TierReport:
        return self.reports.get(timeout=WAIT_S)


@pytest.fixture
def line():
    made = Line(make_arena())
    yield made
    made.staging.stop()


def held_up(monkeypatch, method: str) -> threading.Event:
    """Calls of an arena's method wait for the event."""
    go, original = threading.Event(), getattr(SnapshotArena, method)

    def waiting(self, *args):
        assert go.wait(WAIT_S)
        return original(self, *args)

    monkeypatch.setattr(SnapshotArena, method, waiting)
    return go


def test_copies_do_not_wait_for_a_slow_disk(line, monkeypatch, tmp_path):
    """Neither for what is read nor for what is written."""
    line.begin(1, TierMove.STORE)
    assert not line.report().fault
    reading, writing = held_up(monkeypatch, "read"), held_up(monkeypatch, "write")
    line.begin(2, TierMove.WRITE, path=str(tmp_path / "a"))
    line.begin(3, TierMove.READ, path=str(tmp_path / "b"), checksums=("",), offset=1 << 19)
    line.begin(4, TierMove.LOAD)
    assert line.report().ticket == 4
    reading.set()
    missing = line.report()
    assert (missing.ticket, missing.fault) == (3, TierFault.CORRUPT)
    writing.set()
    assert (line.report().ticket, line.loaded) == (2, [4])


def test_stop_ends_moves_that_were_begun_and_reports_them(monkeypatch, tmp_path):
    line = Line(make_arena())
    storing = held_up(monkeypatch, "store")
    line.begin(1, TierMove.STORE)
    line.begin(2, TierMove.LOAD)
    stopping = threading.Thread(target=line.staging.stop)
    stopping.start()
    storing.set()
    stopping.join(WAIT_S)
    assert not stopping.is_alive()
    assert [(r.ticket, r.fault) for r in (line.report(), line.report())] == [(1, 0), (2, 0)]
    line.staging.stop()


def test_two_threads_may_claim_the_halves_of_one_older_region():
    """Mover and reader, one between the look and the deletion of the other."""
    arena = make_arena()
    size = arena.layout.num_bytes(1)
    orders = [
        TierOrder(ticket, TierMove.READ, entry=2, tokens=1, offset=ticket * size)
        for ticket in (0, 1)
    ]

    class Interrupted(dict):
        def items(self):
            found = list(super().items())
            if orders:
                arena._claim(orders.pop())
            return found

    arena._held = Interrupted({0: Content(entry=1, tokens=TOKENS, num_bytes=2 * size)})
    arena._claim(orders.pop(0))
    assert not orders and not arena._held


class FakeCuda:
    """Streams and events that note what they are asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def Event(self):
        outer = self

        class Event:
            def record(self) -> None:
                outer.calls.append("record")

        return Event()

    def Stream(self):
        outer = self

        class Stream:
            def wait_event(self, event) -> None:
                outer.calls.append("wait")

            def synchronize(self) -> None:
                outer.calls.append("drain")

        return Stream()

    @contextlib.contextmanager
    def stream(self, stream):
        self.calls.append("enter")
        yield
        self.calls.append("leave")


@pytest.mark.parametrize("move", [TierMove.STORE, TierMove.LOAD])
def test_cuda_copy_waits_for_the_rounds_before_it_and_is_drained_before_its_report(
    monkeypatch, move
):
    fake = FakeCuda()
    for name in ("Event", "Stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    line = Line(make_arena(), device="cuda")
    line.begin(1, TierMove.STORE)
    line.report()
    fake.calls.clear()
    copy = getattr(SnapshotArena, move.name.lower())

    def noted(self, order):
        fake.calls.append("copy")
        return copy(self, order)

    monkeypatch.setattr(SnapshotArena, move.name.lower(), noted)
    order = TierOrder(2, move, entry=1, tokens=TOKENS, row=0, pages=(1, 2))
    line.staging.begin(order, lambda report: fake.calls.append("told"))
    line.staging.stop()
    assert fake.calls == ["record", "enter", "wait", "copy", "leave", "drain", "told"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_host_tier_is_page_locked_where_the_device_is_cuda(monkeypatch, device):
    asked = []

    def zeros(*shape, dtype, pin_memory=False):
        asked.append(pin_memory)
        return torch.empty(shape, dtype=dtype).zero_()

    store = StateStore(SPEC, LIMITS)
    monkeypatch.setattr(snapshot_host.torch, "zeros", zeros)
    SnapshotArena(store, SPEC, dataclasses.replace(LIMITS, device=device), ARENA_BYTES)
    assert asked == [device == "cuda"]
