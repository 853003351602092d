"""One rank as an operating-system process, without Ray: `python -m tests.support.rank_process`.

Arguments: address, rank, world size, seconds per round, behaviour. Behaviours:
    serve    answer every plan
    die:N    SIGKILL itself when it reads the plan of round N
    abort:N  abort() there, as a failed assertion in native code would
    raise:N  raise there
    hang:N   never answer it
    lie:N    answer it with another checksum
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import msgspec

from flare_ray.actors.listener import connect
from flare_ray.actors.rank_loop import EXIT_FAILED, EXIT_HUNG_UP, HangUpWatch, LastWords, serve_rank
from flare_ray.actors.wire import RankHello
from flare_ray.contracts.plan import RoundPlan
from flare_ray.contracts.record import RoundReply
from tests.support.fake_channel import make_manifest
from tests.support.stand_in import StandInExecutor


class MisbehavingExecutor(StandInExecutor):
    """A stand-in that keeps its behaviour for one round."""

    behaviour = "serve"
    at_round = -1

    def execute(self, plan: RoundPlan, masks: object = None) -> RoundReply:
        if plan.round_id != self.at_round:
            return super().execute(plan, masks)
        if self.behaviour == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.behaviour == "abort":
            os.abort()
        elif self.behaviour == "hang":
            threading.Event().wait()
        elif self.behaviour == "raise":
            raise RuntimeError(f"no luck in round {plan.round_id}\nand a second line")
        reply = super().execute(plan, masks)
        return msgspec.structs.replace(reply, checksum=reply.checksum + 1)


def main() -> None:
    address, rank, world_size, round_s, behaviour = sys.argv[1:]
    executor = MisbehavingExecutor(make_manifest(), rank=int(rank), round_s=float(round_s))
    executor.behaviour, _, at_round = behaviour.partition(":")
    executor.at_round = int(at_round or -1)
    words = LastWords()
    words.catch_fatal_signals()
    hello = RankHello(int(rank), int(world_size), os.getpid())
    sock = connect(address, hello, words_fd=words.fd, timeout_s=5.0)
    HangUpWatch(sock)
    try:
        serve_rank(sock, executor, rank=int(rank))
    except RuntimeError:
        os._exit(EXIT_FAILED)
    os._exit(EXIT_HUNG_UP)


def start_rank(
    address: str, rank: int, world_size: int, *, behaviour: str = "serve", round_s: float = 0.0
) -> subprocess.Popen[bytes]:
    """Start one; the caller waits for or kills it."""
    arguments = [address, str(rank), str(world_size), str(round_s), behaviour]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.rank_process", *arguments],
        stderr=subprocess.DEVNULL,
    )


def wait_until(condition, *, timeout_s: float, what: str) -> float:
    """Seconds until `condition()` holds; fails the test after `timeout_s`."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.005)
    return time.monotonic() - start


if __name__ == "__main__":
    main()
