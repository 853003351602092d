"""Channel (c) between one controller and rank processes: order, faults, wake, sizes."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from flare_ray.actors import listener as listeners
from flare_ray.actors.channel import SocketChannel
from flare_ray.actors.listener import RankListener
from flare_ray.actors.masks import MaskBlock, MaskReader, mask_words
from flare_ray.actors.rank_loop import EXIT_FAILED, EXIT_HUNG_UP, serve_rank
from flare_ray.actors.wire import (
    ERROR_TEXT_BYTES,
    MAX_MESSAGE_BYTES,
    check_message_bounds,
    decode_reply,
    encode_reply,
    error_reply,
)
from flare_ray.contracts.plan import PageGrant
from flare_ray.contracts.record import RoundReply
from flare_ray.contracts.tiers import TierFault, TierMove, TierOrder
from flare_ray.errors import ConfigError, ContractViolation, RankFailure
from tests.actors.ray_support import rank_addresses
from tests.support.fake_channel import make_manifest
from tests.support.plans import prefill_plan
from tests.support.rank_process import start_rank

MANIFEST = make_manifest()
GREETING_S = 20.0
FAULT_LIMIT_S = 1.0
"""A dead rank must be known within a second (contract: A4)."""

Start = Callable[..., SocketChannel]


class Ranks:
    """Rank processes of one test."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[SocketChannel] = []

    def start(
        self, *behaviours: str, round_s: float = 0.0, rank_timeout_s: float = 10.0
    ) -> SocketChannel:
        world_size = len(behaviours)
        listener = RankListener(world_size)
        self.processes += [
            start_rank(listener.address, rank, world_size, behaviour=behaviour, round_s=round_s)
            for rank, behaviour in enumerate(behaviours)
        ]
        channel = SocketChannel(listener.accept(timeout_s=GREETING_S), rank_timeout_s)
        self.channels.append(channel)
        return channel


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    for channel in started.channels:
        channel.close()
    for process in started.processes:
        process.kill()
        process.wait()


def play(channel: SocketChannel, round_id: int):
    channel.submit(prefill_plan(MANIFEST, round_id))
    return channel.receive(5.0)


def fault_of(channel: SocketChannel, rounds: int) -> tuple[RankFailure, float]:
    """The failure of the first `rounds` rounds, and seconds from the last submission to it."""
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        for round_id in range(rounds):
            start = time.monotonic()
            assert play(channel, round_id) is not None
    return caught.value, time.monotonic() - start


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_round_is_answered_once_by_all_ranks_in_plan_order(ranks, world_size):
    channel = ranks.start(*["serve"] * world_size)
    results = [play(channel, round_id) for round_id in range(5)]
    assert [result.round_id for result in results] == list(range(5))
    assert all(len(result.lanes) == 1 for result in results)


def test_move_is_reported_once_every_rank_has_done_it_and_rounds_go_on(ranks):
    channel = ranks.start("serve", "serve")
    channel.order(TierOrder(1, TierMove.WRITE, 7, 70, path="p"))
    assert [play(channel, round_id).round_id for round_id in range(3)] == [0, 1, 2]
    outcomes = channel.take_outcomes()
    # An idle channel wakes for it.
    while not outcomes:
        assert channel.receive(5.0) is None
        outcomes = channel.take_outcomes()
    [outcome] = outcomes
    assert (outcome.ticket, outcome.fault, outcome.num_bytes) == (1, TierFault.NONE, 11)
    assert outcome.checksums == ("sum 0", "sum 1")
    assert channel.take_outcomes() == ()


def test_move_fails_if_one_rank_fails_and_names_it(ranks):
    channel = ranks.start("serve", "serve")
    channel.order(TierOrder(5, TierMove.READ, 7, 70, path="p"))
    assert channel.receive(5.0) is None
    [outcome] = channel.take_outcomes()
    assert outcome.fault is TierFault.CORRUPT and outcome.text == "rank 1: damaged"


def test_order_larger_than_a_message_is_refused(ranks):
    channel = ranks.start("serve")
    with pytest.raises(ContractViolation, match="at most"):
        channel.order(TierOrder(1, TierMove.LOAD, 7, 70, pages=(70000,) * 20_000))


def test_two_queued_rounds_are_answered_in_order(ranks):
    channel = ranks.start("serve", "serve")
    for round_id in (0, 1):
        channel.submit(prefill_plan(MANIFEST, round_id, slot=round_id))
    assert [channel.receive(5.0).round_id for _ in range(2)] == [0, 1]


def test_third_queued_round_is_refused_and_the_queue_survives(ranks):
    channel = ranks.start("serve", round_s=0.1)
    for round_id in (0, 1):
        channel.submit(prefill_plan(MANIFEST, round_id, slot=round_id))
    with pytest.raises(ContractViolation, match="at most 2"):
        channel.submit(prefill_plan(MANIFEST, 2, slot=2))
    assert [channel.receive(5.0).round_id for _ in range(2)] == [0, 1]


def test_two_largest_plans_are_queued_without_waiting(ranks):
    channel = ranks.start("hang:0")
    # Filled by page grants: the channel looks at size alone, and this rank reads but one plan.
    for round_id in (0, 1):
        plan = prefill_plan(MANIFEST, round_id)
        grants = (PageGrant(0, 1, (70000,) * (MAX_MESSAGE_BYTES // 5 - 60)),)
        start = time.monotonic()
        channel.submit(msgspec.structs.replace(plan, grants=grants))
        assert time.monotonic() - start < 0.1


def test_receive_returns_none_when_nothing_arrives_in_time(ranks):
    channel = ranks.start("serve")
    start = time.monotonic()
    assert channel.receive(0.05) is None
    assert 0.05 <= time.monotonic() - start < 0.5


def test_wake_ends_a_blocked_receive(ranks):
    channel = ranks.start("serve")
    threading.Timer(0.05, channel.wake).start()
    start = time.monotonic()
    assert channel.receive(10.0) is None
    assert time.monotonic() - start < 1.0


def test_wake_before_receive_is_not_lost(ranks):
    channel = ranks.start("serve")
    channel.wake()
    start = time.monotonic()
    assert channel.receive(10.0) is None
    assert time.monotonic() - start < 1.0
    assert channel.receive(0.0) is None


def test_wake_after_close_touches_no_descriptor(ranks):
    channel = ranks.start("serve")
    channel.close()
    reader, writer = os.pipe()  # takes the number that the wake descriptor had
    try:
        channel.wake()
        os.set_blocking(reader, False)
        with pytest.raises(BlockingIOError):
            os.read(reader, 8)
    finally:
        os.close(reader)
        os.close(writer)


def test_differing_checksums_stop_the_channel_naming_both(ranks):
    failure, _ = fault_of(ranks.start("serve", "lie:3"), 4)
    assert failure.rank == -1 and failure.round_id == 3
    assert "rank 0 reports" in str(failure) and "rank 1 reports" in str(failure)


def test_killed_rank_is_named_with_its_round_within_a_second(ranks):
    failure, seconds = fault_of(ranks.start("serve", "die:2"), 3)
    assert (failure.rank, failure.round_id) == (1, 2)
    assert "died" in str(failure) and "killed" in str(failure)
    assert seconds < FAULT_LIMIT_S


def test_rank_killed_while_idle_is_noticed_without_a_round(ranks):
    channel = ranks.start("serve", "serve")
    assert play(channel, 0) is not None
    ranks.processes[1].kill()
    with pytest.raises(RankFailure, match=r"rank 1 .*idle after round 0"):
        channel.receive(FAULT_LIMIT_S)


def test_aborted_rank_leaves_its_last_words(ranks):
    failure, _ = fault_of(ranks.start("abort:1"), 2)
    assert "Fatal Python error: Aborted" in str(failure)
    assert any("execute" in note for note in failure.__notes__)


def test_raising_rank_reports_one_line_and_keeps_its_traceback_as_a_note(ranks):
    failure, _ = fault_of(ranks.start("raise:1"), 2)
    assert (failure.rank, failure.round_id) == (0, 1)
    assert "RuntimeError: no luck in round 1 | and a second line" in str(failure)
    assert "Traceback" not in str(failure) and "Traceback" in failure.__notes__[0]


def test_dead_rank_is_blamed_though_a_survivor_complains_first(ranks):
    channel = ranks.start("raise:1", "serve")
    assert play(channel, 0) is not None
    killer = threading.Timer(0.03, ranks.processes[1].kill)
    ranks.processes[1].send_signal(signal.SIGSTOP)  # it will not answer round 1
    channel.submit(prefill_plan(MANIFEST, 1))
    killer.start()
    with pytest.raises(RankFailure) as caught:
        channel.receive(5.0)
    assert caught.value.rank == 1
    assert any("rank 0 failed in round 1" in note for note in caught.value.__notes__)


def test_first_complaint_is_blamed_when_nobody_died(ranks):
    failure, _ = fault_of(ranks.start("raise:1", "serve"), 2)
    assert failure.rank == 0


def test_hung_rank_is_named_after_the_timeout(ranks):
    failure, seconds = fault_of(ranks.start("serve", "hang:1", rank_timeout_s=0.3), 2)
    assert (failure.rank, failure.round_id) == (1, 1)
    assert "hung" in str(failure) and "rank_timeout_s" in str(failure)
    assert 0.3 <= seconds < 1.0


def test_failure_is_sticky(ranks):
    channel = ranks.start("raise:0")
    failure, _ = fault_of(channel, 1)
    for call in (lambda: channel.receive(0.0), lambda: channel.submit(prefill_plan(MANIFEST, 1))):
        with pytest.raises(RankFailure) as again:
            call()
        assert again.value is failure


def test_submit_to_a_dead_rank_fails_with_its_own_words(ranks):
    channel = ranks.start("raise:0")
    channel.submit(prefill_plan(MANIFEST, 0))
    ranks.processes[0].wait(10)
    with pytest.raises(RankFailure, match="no luck in round 0"):
        channel.submit(prefill_plan(MANIFEST, 1))


def test_oversized_plan_is_refused_with_both_sizes_and_nothing_is_sent(ranks):
    channel = ranks.start("serve")
    grants = (PageGrant(0, 0, tuple(range(70000, 90000))),)
    plan = msgspec.structs.replace(prefill_plan(MANIFEST, 0), grants=grants)
    with pytest.raises(ContractViolation, match=str(MAX_MESSAGE_BYTES)):
        channel.submit(plan)
    assert play(channel, 0).round_id == 0


def test_oversized_reply_becomes_an_error_that_fits():
    rows = tuple(2**40 + n for n in range(20000))
    message = encode_reply(RoundReply(rank=1, round_id=7, checksum=0, elapsed_ns=0, rows=rows))
    assert len(message) <= MAX_MESSAGE_BYTES
    assert "at most" in decode_reply(message).error


def test_long_error_text_keeps_its_end():
    reply = error_reply(0, 1, "x" * 100_000 + "the cause")
    assert len(reply.error) <= ERROR_TEXT_BYTES + 8
    assert reply.error.endswith("the cause")


def test_preparation_whose_prefill_cannot_be_sent_is_refused():
    check_message_bounds(make_manifest(slots=4, prefill_tokens=8192, context_tokens=16384))
    many = make_manifest(slots=4, prefill_tokens=32768, context_tokens=65536)
    with pytest.raises(ConfigError, match="prefill_tokens"):
        check_message_bounds(msgspec.structs.replace(many, vocab_size=150_000))


def test_closing_the_channel_ends_ranks_that_are_inside_a_round(ranks):
    channel = ranks.start("hang:0", "serve")
    channel.submit(prefill_plan(MANIFEST, 0))
    assert channel.receive(0.1) is None
    channel.close()
    assert [process.wait(2.0) for process in ranks.processes] == [EXIT_HUNG_UP] * 2


def test_rank_that_failed_exits_by_itself(ranks):
    fault_of(ranks.start("raise:0"), 1)
    assert ranks.processes[0].wait(2.0) == EXIT_FAILED


def test_address_is_no_file_and_gone_with_its_sockets(ranks):
    """Known fault: an engine that was killed while it started left a folder with a socket."""
    listener = RankListener(1)
    assert listener.address in rank_addresses()
    assert not os.path.exists(listener.address)
    ranks.processes.append(start_rank(listener.address, 0, 1))
    channel = SocketChannel(listener.accept(timeout_s=GREETING_S), 1.0)
    with pytest.raises(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late:
        late.connect("\0" + listener.address.removeprefix("@"))
    channel.close()
    assert listener.address not in rank_addresses()


def test_other_users_are_turned_away_and_the_start_goes_on(ranks, monkeypatch):
    """Names in the abstract space have no mode: anybody of the machine can connect."""
    users = iter([os.getuid() + 1, os.getuid()])
    monkeypatch.setattr(listeners, "user_of", lambda sock: next(users))
    listener = RankListener(1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect("\0" + listener.address.removeprefix("@"))
        ranks.processes.append(start_rank(listener.address, 0, 1))
        ranks.channels.append(SocketChannel(listener.accept(timeout_s=GREETING_S), 1.0))
        assert stranger.recv(1) == b""
    assert play(ranks.channels[0], 0).round_id == 0


def test_absent_rank_fails_the_greeting_by_name(ranks):
    listener = RankListener(2)
    ranks.processes.append(start_rank(listener.address, 0, 2))
    with pytest.raises(RankFailure, match=r"ranks \[1\] did not greet"):
        listener.accept(timeout_s=3.0)


def test_rank_of_another_world_size_is_refused(ranks):
    listener = RankListener(2)
    ranks.processes.append(start_rank(listener.address, 0, 4))
    with pytest.raises(RankFailure, match="rank 0 of 4"):
        listener.accept(timeout_s=GREETING_S)


def test_masks_reach_the_reader_by_name():
    block = MaskBlock(rows=4, vocab_size=100)
    try:
        block.rows[:] = np.arange(4 * mask_words(100)).reshape(4, -1)
        reader = MaskReader(vocab_size=100)
        plan = msgspec.structs.replace(
            prefill_plan(MANIFEST, 0), mask_block=block.name, mask_rows=3
        )
        assert np.array_equal(reader.read(plan), block.rows[:3])
        block.rows[1, 1] = 77
        assert reader.read(plan)[1, 1] == 77
    finally:
        block.close()


def test_missing_or_small_mask_block_is_refused_by_name():
    reader = MaskReader(vocab_size=100)
    plan = msgspec.structs.replace(prefill_plan(MANIFEST, 0), mask_block="absent", mask_rows=1)
    with pytest.raises(ContractViolation, match="absent"):
        reader.read(plan)
    block = MaskBlock(rows=1, vocab_size=100)
    try:
        with pytest.raises(ContractViolation, match="needs"):
            reader.read(msgspec.structs.replace(plan, mask_block=block.name, mask_rows=1000))
    finally:
        block.close()


def test_serve_rank_answers_an_unreadable_plan_with_an_error():
    import socket

    from tests.support.stand_in import StandInExecutor

    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, theirs:
        mine.send(b"\xc1 not a plan")
        with pytest.raises(msgspec.MsgspecError):
            serve_rank(theirs, StandInExecutor(MANIFEST), rank=0)
        assert decode_reply(mine.recv(MAX_MESSAGE_BYTES)).error
