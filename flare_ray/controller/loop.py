"""The controller: one thread that decides every round of one engine (contract: C1, T6, T7).

It owns requests, slots, pages and widths; it owns no transport (`RankChannel`), no delivery
(`OutputPort`) and no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flare_ray.config import EngineConfig
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.request import GenerationRequest
from flare_ray.controller.ports import OutputPort, RankChannel
from flare_ray.metrics.recorder import Recorder


class ControllerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Where the controller stands; read by health checks and `top` from any thread.

    Attributes:
        running: requests that hold a slot.
        waiting: admitted requests without a slot.
        free_pages / total_pages: pages nobody holds or has been promised / pages of the pool, the
            null page excluded.
        rounds: programs harvested since the start, prefill included.
        last_progress_ns: clock reading when a round was last harvested or work last began.
        pending_work: some request is live; with it, an old `last_progress_ns` means a hang.
        fatal: text of the failure that ended the loop, "" while it is well.
    """

    running: int
    waiting: int
    free_pages: int
    total_pages: int
    rounds: int
    last_progress_ns: int
    pending_work: bool
    fatal: str


class Controller:
    """Decides rounds for one engine.

    `submit`, `cancel`, `stop` and `stats` may be called from any thread; everything else belongs to
    the thread that calls `run` (or, in tests, `step`). The caller closes the channel after `run`
    has returned.

    Args:
        manifest: what was prepared; equal on all ranks.
        config: the engine's settings; may select less than was prepared, never more.
        channel: the ranks.
        output: receives the items of each round, one tuple per reply address.
        token_bytes: bytes of every token id, b"" for special tokens
            (`grammar.token_bytes.token_bytes`).
        recorder: metrics of this engine, written by the controller's thread only; its clock is the
            controller's clock.
    Raises:
        ConfigError: the settings select nothing that was prepared, or ask for what is not built.
    """

    def __init__(
        self,
        manifest: PreparedManifest,
        config: EngineConfig,
        *,
        channel: RankChannel,
        output: OutputPort,
        token_bytes: Sequence[bytes],
        recorder: Recorder,
    ) -> None:
        raise NotImplementedError

    def submit(self, request: GenerationRequest) -> None:
        """Hand over a request; the first item sent for it is `Admitted` or `Failed`.

        Thread-safe, never blocks on a round.

        Raises:
            InvalidRequest: a live request has the same id (no item is sent: it would reach the
                other request's stream).
            Overloaded: the controller is stopping (status 503).
            RankFailure: the engine has failed before; sticky.
        """
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        """End a request with `Failed(code="cancelled")`; slot and pages are free at the next round
        boundary.

        Thread-safe and idempotent; an unknown or finished id is no error.
        """
        raise NotImplementedError

    def run(self) -> None:
        """Run the loop until `stop` or a fatal failure; the failure is in `stats().fatal`."""
        raise NotImplementedError

    def step(self, timeout_s: float) -> bool:
        """One iteration, waiting at most `timeout_s` for a round.

        Returns:
            Whether a command was taken, a plan submitted or a round harvested.
        """
        raise NotImplementedError

    def stop(self, *, drain: bool) -> None:
        """Refuse new requests and end `run`: once live requests have ended if `drain`, else now.

        Without drain every live request gets `Failed(code="cancelled", status=503)`. Returns at
        once; join the thread that called `run`.
        """
        raise NotImplementedError

    def stats(self) -> ControllerStats:
        """Counts that were true at some moment during the call; any thread."""
        raise NotImplementedError
