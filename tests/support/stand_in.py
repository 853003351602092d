"""A rank executor without a device: plays the fake channel's token scripts, one process or many.

Every rank computes the same rows, so checksums agree; rank 0 returns them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import msgspec

from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.plan import RoundPlan
from flare_ray.contracts.record import METADATA_FIELDS, TOKEN_FIELDS, LaneRecord, RoundReply
from flare_ray.contracts.tiers import TierFault, TierMove, TierOrder, TierReport
from tests.support.fake_channel import FakeChannel, hashed_accepts, hashed_script

MOVE_S = 0.05


def flat_rows(lanes: tuple[LaneRecord, ...]) -> tuple[int, ...]:
    """The rows of a reply, as a device would lay them out."""
    rows: list[int] = []
    for lane in lanes:
        metadata = msgspec.structs.astuple(lane)[:METADATA_FIELDS]
        rows += [*metadata, *lane.tokens, *[-1] * (TOKEN_FIELDS - len(lane.tokens))]
    return tuple(rows)


class StandInExecutor:
    """Executes plans by script.

    Args:
        round_s: how long a round takes.
    """

    def __init__(
        self,
        manifest: PreparedManifest,
        *,
        rank: int = 0,
        round_s: float = 0.0,
        accept_rate: float = 0.6,
    ) -> None:
        self.manifest = manifest
        self.rank = rank
        self.round_s = round_s
        self.executed = 0
        script = hashed_script(manifest.vocab_size, first_token=1)
        self._device = FakeChannel(manifest, script, hashed_accepts(accept_rate))

    def order(self, order: TierOrder, report: Callable[[TierReport], None]) -> None:
        """Report the move a moment later, from another thread; rank 1 finds its file damaged."""
        is_bad = order.move is TierMove.READ and self.rank == 1
        done = TierReport(
            ticket=order.ticket,
            rank=self.rank,
            fault=TierFault.CORRUPT if is_bad else TierFault.NONE,
            num_bytes=10 + self.rank,
            checksum=f"sum {self.rank}",
            text="damaged" if is_bad else "",
        )
        threading.Timer(MOVE_S, report, [done]).start()

    def close(self) -> None:
        """Its threads end by themselves."""

    def execute(self, plan: RoundPlan, masks: object = None) -> RoundReply:
        start_ns = time.monotonic_ns()
        if self.round_s:
            time.sleep(self.round_s)
        self._device.submit(plan)
        result = self._device.receive(0)
        assert result is not None
        rows = flat_rows(result.lanes)
        self.executed += 1
        return RoundReply(
            rank=self.rank,
            round_id=plan.round_id,
            checksum=sum(
                itertools.starmap(lambda place, value: (place + 1) * value, enumerate(rows))
            )
            % 2**31,
            elapsed_ns=time.monotonic_ns() - start_ns,
            rows=rows if self.rank == 0 else (),
        )
