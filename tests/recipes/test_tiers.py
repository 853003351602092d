"""A prefix that comes back from host memory or from disk gives the logits of a cold run, target and
drafter, in every recipe (contract: M7).

Between leaving the device and coming back everything of it is overwritten: its row and pages, every
byte of the arena that holds nothing, and for the disk the arena as a whole.
"""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
import torch

from flare_ray.contracts.plan import SnapshotSave
from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.contracts.tiers import TierFault, TierMove, TierOrder, TierReport
from flare_ray.errors import ContractViolation
from tests.recipes.test_prefix_reuse import (
    LOGITS_ATOL,
    RECIPES,
    ROW,
    TAIL,
    Engine,
    assert_equal,
    largest_error,
    listening_engine,
)
from tests.support.scripted.harness import Request
from tests.support.tier_memory import poison_free

LENGTHS = (1, 63, 64, 65, 127, 128, 129)
HOST_BYTES = 4 << 20
OFFSET = 1 << 20
OTHER_ROW = ROW + 2
PAGES_BEHIND = 40
"""Pages from here on belong to no request of these tests."""


@pytest.fixture(scope="module", params=RECIPES)
def folder(request, tmp_path_factory) -> Path:
    return RECIPES[request.param](tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def engine(folder):
    engine = listening_engine(folder, host_bytes=HOST_BYTES)
    yield engine
    engine.driver.ranks[0].close()


class Moves:
    """Orders to one rank, each waited for."""

    def __init__(self, engine: Engine) -> None:
        self.rank = engine.driver.ranks[0]
        self.reports: queue.SimpleQueue[TierReport] = queue.SimpleQueue()
        self.ticket = 0

    def __call__(self, move: TierMove, tokens: int, **fields) -> TierReport:
        self.ticket += 1
        fields = {"entry": 7, "offset": OFFSET, "speculation": True, **fields}
        self.rank.order(TierOrder(self.ticket, move, tokens=tokens, **fields), self.reports.put)
        report = self.reports.get(timeout=20)
        assert report.ticket == self.ticket
        return report

    def well(self, move: TierMove, tokens: int, **fields) -> TierReport:
        report = self(move, tokens, **fields)
        assert report.fault is TierFault.NONE, report.text
        return report

    def wipe(self, pages: tuple[int, ...], row: int) -> None:
        """Poison what the device held, and whatever the arena does not hold."""
        store = self.rank.store
        with torch.inference_mode():
            for group in store.spec_groups:
                if group.kind == "page":
                    store.groups[group.name][list(pages)] = float("nan")
                elif group.name in store.snapshots.rows:
                    target = store.snapshots.rows[group.name][row]
                    target.fill_(float("nan") if target.is_floating_point() else 2**40)
            store.snapshots.tail[row] = float("nan")
            store.snapshots.sampling_vector[row] = float("nan")
        poison_free(self.rank.staging.arena)

    def wipe_host(self) -> None:
        self.rank.staging.arena._held.clear()
        poison_free(self.rank.staging.arena)


def cold_runs(engine: Engine, length: int):
    """(prefix request with its snapshot in ROW, its tail, logits of two cold runs)."""
    prefix, tail = engine.tokens(length, 1), engine.tokens(TAIL, 2)
    engine.forget()
    whole = engine.listen(engine.cold((*prefix, *tail), 1))
    cut = engine.listen(engine.cold((*prefix, *tail), 2, cut=length))
    del cut.target[0]
    origin = engine.cold(prefix, 0, capture=True)
    engine.listen(origin)
    return origin, tail, cut, whole


def pages_of(origin: Request, length: int) -> tuple[int, ...]:
    return tuple(origin.pages[: -(-length // PAGE_TOKENS)])


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("length", LENGTHS)
def test_prefix_from_a_lower_tier_equals_a_cold_run(engine, tmp_path, length, tier):
    origin, tail, cut, whole = cold_runs(engine, length)
    moves, path = Moves(engine), str(tmp_path / "stem")
    pages = pages_of(origin, length)
    moves.well(TierMove.STORE, length, row=ROW, pages=pages)
    if tier == "disk":
        written = moves.well(TierMove.WRITE, length, path=path, label="us")
        moves.wipe_host()
        sums = (written.checksum,)
        moves.well(TierMove.READ, length, path=path, label="us", checksums=sums, entry=9)
    moves.wipe(pages, ROW)
    elsewhere = tuple(range(PAGES_BEHIND, PAGES_BEHIND + len(pages)))
    entry = 9 if tier == "disk" else 7
    moves.well(TierMove.LOAD, length, row=OTHER_ROW, pages=elsewhere, entry=entry)
    origin.pages = elsewhere
    warm = engine.listen(engine.restored(origin, length, tail, 1, row=OTHER_ROW))
    assert_equal(warm, cut)
    assert largest_error(warm, whole) <= LOGITS_ATOL


def test_save_that_no_plan_carried_is_stored(engine):
    """The end of a finished request: saved and copied by one order, without a further plan."""
    origin = engine.cold(engine.tokens(90, 1), 0)
    engine.driver.round([origin], 4)
    consumed = origin.records[-1].consumed
    moves = Moves(engine)
    pages = tuple(origin.pages[: -(-consumed // PAGE_TOKENS)])
    save = SnapshotSave(0, origin.epoch, consumed, ROW, True)
    moves.well(TierMove.STORE, consumed, row=ROW, pages=pages, saves=(save,))
    moves.wipe((), ROW)
    moves.well(TierMove.LOAD, consumed, row=OTHER_ROW, pages=pages)
    engine.forget()
    warm = engine.listen(
        engine.restored(origin, consumed, origin.tokens[-1:], 1, row=OTHER_ROW), rounds=0
    )
    engine.driver.round([origin], 1)
    itself = engine.listen(origin, rounds=0)
    assert float((warm.target[0] - itself.target[0]).abs().max()) <= LOGITS_ATOL


def test_part_file_is_a_safetensors_file(engine, tmp_path):
    from safetensors.torch import load_file

    origin, *_ = cold_runs(engine, 65)
    moves, path = Moves(engine), str(tmp_path / "stem")
    moves.well(TierMove.STORE, 65, row=ROW, pages=pages_of(origin, 65))
    moves.well(TierMove.WRITE, 65, path=path, label="us")
    tensors = load_file(tmp_path / "stem.r0.part")
    store = moves.rank.store
    for name, rows in store.snapshots.rows.items():
        assert torch.equal(tensors[f"row.{name}"], rows[ROW])
    paged = {group.name for group in store.spec_groups if group.kind == "page"}
    assert {name for name in tensors if name.startswith("page.")} == {f"page.{n}" for n in paged}


@pytest.mark.parametrize(
    "damage",
    ["flip_header", "flip_data", "flip_last", "cut", "cut_all", "longer", "gone", "other_label"],
)
def test_damaged_file_is_never_served(engine, tmp_path, damage):
    origin, *_ = cold_runs(engine, 70)
    moves, path = Moves(engine), str(tmp_path / "stem")
    moves.well(TierMove.STORE, 70, row=ROW, pages=pages_of(origin, 70))
    written = moves.well(TierMove.WRITE, 70, path=path, label="us")
    file = tmp_path / "stem.r0.part"
    data = bytearray(file.read_bytes())
    place = {"flip_header": 40, "flip_data": len(data) // 2, "flip_last": len(data) - 1}.get(damage)
    if place is not None:
        data[place] ^= 1 << 3
    data = {"cut": data[:-5], "cut_all": bytearray(), "longer": data + b"\0"}.get(damage, data)
    file.write_bytes(data)
    if damage == "gone":
        file.unlink()
    label = "others" if damage == "other_label" else "us"
    sums = (written.checksum,)
    report = moves(TierMove.READ, 70, path=path, label=label, checksums=sums, entry=9)
    assert report.fault is TierFault.CORRUPT and "stem.r0.part" in report.text
    # neither what was read nor what lay there before can reach the device
    for entry in (7, 9):
        spoiled = moves(TierMove.LOAD, 70, row=OTHER_ROW, pages=(41, 42), entry=entry)
        assert spoiled.fault is TierFault.FAILED
    with pytest.raises(ContractViolation):
        engine.restored(origin, 70, engine.tokens(TAIL, 2), 1, row=OTHER_ROW)


def test_one_stale_byte_of_a_host_copy_would_be_caught(engine):
    """Negative control of the comparison above."""
    origin, tail, cut, _ = cold_runs(engine, 66)
    moves = Moves(engine)
    pages = pages_of(origin, 66)
    moves.well(TierMove.STORE, 66, row=ROW, pages=pages)
    place = next(
        p
        for p in moves.rank.staging.arena.layout.places(66)
        if "recurrent" in p.name or "window" in p.name
    )
    memory = moves.rank.staging.arena.memory.numpy()
    memory[OFFSET + place.start : OFFSET + place.start + place.num_bytes] = 0
    moves.wipe(pages, ROW)
    moves.well(TierMove.LOAD, 66, row=OTHER_ROW, pages=pages)
    engine.forget()
    warm = engine.listen(engine.restored(origin, 66, tail, 1, row=OTHER_ROW))
    assert largest_error(warm, cut) > LOGITS_ATOL


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"row": 999}, "row 999"),
        ({"pages": (1,)}, "1 pages for 70"),
        ({"pages": (0, 1)}, "outside"),
        ({"row": OTHER_ROW}, "holds None"),
        ({"speculation": False}, "expected"),
    ],
)
def test_store_of_what_is_not_there_is_refused(engine, fields, wrong):
    origin, *_ = cold_runs(engine, 70)
    order = {"row": ROW, "pages": pages_of(origin, 70), **fields}
    with pytest.raises(ContractViolation, match=wrong):
        Moves(engine)(TierMove.STORE, 70, **order)
