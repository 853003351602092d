"""The executor's own part: frames, replies, host time (contract: T5, C7)."""

import time

import pytest
import torch

from flare_ray.contracts.plan import LanePlan, RoundPlan
from flare_ray.contracts.record import RECORD_FIELDS, Field, unpack_rows
from flare_ray.contracts.shapes import GraphKind
from flare_ray.device.speculation.record import Frames
from flare_ray.errors import ContractViolation
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Setup, scripted_rank

HOST_LIMIT_S = 0.5e-3
"""CPU seconds of the host's part of one round of four lanes; measured 44 microseconds on a busy
two-core machine, so that only a change of kind fails it."""


def test_frames_alternate_and_are_owned_until_released():
    frames = Frames(2, "cpu")
    record = torch.arange(2 * RECORD_FIELDS).view(2, -1)
    first = frames.send(record)
    second = frames.send(record + 1)
    assert {first.index, second.index} == {0, 1}
    assert frames.receive(first)[0, 1] == 1  # the second transfer left the first frame alone
    with pytest.raises(ContractViolation, match="third round"):
        frames.send(record)
    frames.release(first)
    assert frames.send(record).index == first.index


def test_reply_holds_one_row_per_planned_lane_in_plan_order():
    driver = Driver(scripted_rank(Script(vocab_size=16), Setup(slots=5)))
    opened = [driver.open((slot,), slot, budget=9) for slot in range(5)]
    requests = driver.prefill(opened)
    backwards = requests[::-1]
    driver.round(backwards, 3)
    (reply,) = driver.replies[-1]
    assert len(reply.rows) == 5 * RECORD_FIELDS
    records = unpack_rows(reply.rows)
    assert [r.uid for r in records] == [r.uid for r in backwards]
    assert [r.epoch for r in records] == [r.epoch for r in backwards]
    assert all(r.round_id == reply.round_id for r in records)
    assert reply.elapsed_ns > 0
    assert not reply.error


def test_slots_generations_reuse_the_same_slot_for_many_requests():
    """Ninety short requests through one slot: every one starts from nothing."""
    driver = Driver(scripted_rank(Script(vocab_size=16, order=2, seed=2), Setup(slots=1)))
    texts = [driver.generate((1, 2, 3), width=1 + i % 8, budget=6).tokens for i in range(90)]
    assert all(text == texts[0] for text in texts)


def test_host_part_of_a_round_is_small():
    driver = Driver(scripted_rank(Script(vocab_size=64), Setup(slots=4, context_tokens=2048)))
    rank = driver.ranks[0]
    opened = [driver.open((1, 2), slot, budget=1500) for slot in range(4)]
    requests = driver.prefill(opened)
    shape = driver.shape(GraphKind.SPECULATIVE, 4, 4, True)
    lanes = tuple(LanePlan(r.slot, r.epoch, 3) for r in requests)
    plans = [
        RoundPlan(next(driver.round_ids), shape, lanes=lanes, context_pages=30) for _ in range(60)
    ]
    for plan in plans[:10]:
        rank.execute(plan)
    program = rank.backend.program(shape)
    program.replay = lambda: None  # the last record stays in its buffer
    started = time.thread_time()
    for plan in plans[10:]:
        reply = rank.execute(plan)
    per_round_s = (time.thread_time() - started) / 50
    assert reply.rows[Field.UID] == requests[0].uid
    assert per_round_s < HOST_LIMIT_S
