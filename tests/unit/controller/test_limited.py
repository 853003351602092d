"""Work with a limit of processor time: what is over it delays nobody for longer."""

import hashlib
import threading
import time

import pytest

from flare_ray.controller.grammar.limited import LimitedThread, _Worker

LIMIT_S = 0.05
WAIT_S = 20.0
LOOKS = 4
"""Limits that pass while a piece waits, each ended by a look at its processor time."""
BLOCK = bytes(1 << 20)
"""Hashed in a millisecond beside the interpreter, as a matcher works."""


@pytest.fixture
def limited():
    thread = LimitedThread(LIMIT_S, name="test-limited")
    yield thread
    thread.close()


def test_outcomes_stand_in_the_order_of_their_pieces(limited):
    assert limited.run([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]
    assert limited.run([]) == []


def test_a_piece_over_the_limit_is_given_up_on_and_the_others_are_done(limited):
    release = threading.Event()

    def stuck() -> int:
        while not release.is_set():
            hashlib.sha256(BLOCK)
        return 7

    started = time.thread_time()
    assert limited.run([lambda: 1, stuck, lambda: 3, stuck, lambda: 5]) == [1, None, 3, None, 5]
    assert time.thread_time() - started < LIMIT_S
    assert limited.num_stuck == 2
    release.set()
    deadline = time.monotonic() + WAIT_S
    while limited.num_stuck and time.monotonic() < deadline:
        time.sleep(0.01)
    assert limited.num_stuck == 0


def test_a_piece_that_waits_without_working_is_waited_for(limited, monkeypatch):
    looked, look = threading.Semaphore(0), _Worker.leave_over

    def counted(self: _Worker, limit_s: float) -> bool:
        left = look(self, limit_s)
        looked.release()
        return left

    def waits() -> bool:
        return all(looked.acquire(timeout=WAIT_S) for _ in range(LOOKS))

    monkeypatch.setattr(_Worker, "leave_over", counted)
    assert limited.run([waits, lambda: 2]) == [True, 2]


def test_several_pieces_may_take_more_than_the_limit_together(limited):
    def short() -> int:
        end = time.thread_time() + LIMIT_S / 2
        while time.thread_time() < end:
            pass
        return 1

    assert limited.run([short] * 6) == [1] * 6


def test_what_a_piece_raises_is_raised(limited):
    def wrong() -> int:
        raise KeyError("x")

    with pytest.raises(KeyError):
        limited.run([lambda: 1, wrong, lambda: 2])
    assert limited.run([lambda: 4]) == [4]


def test_no_thread_is_left_behind(limited):
    limited.run([lambda: 1])
    limited.close()
    assert not [t for t in threading.enumerate() if t.name == "test-limited"]
