"""The two training phases: trunk and MTP jointly, then the MTP layer alone, unrolled on its own
states.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .network import DemoModel
from .network.functional import DraftTarget
from .pool import Batches
from .settings import Settings
from .shape import MTP_DEPTH, SHORT_ROW

CLIP_NORM = 1.0
WEIGHT_DECAY = 0.1
MIXER_RATE = 0.15
"""Learning-rate factor of ``hc_*_fn``: 1,024 inputs of unit size make Adam's steps large."""
DEPTH_DECAY = 0.95
WARM_STEPS = 4
RESERVE_S = 40.0
"""With ``total_s``: compiling the MTP phase, the held-out measures and the end of the run, measured
on an H200 with room to spare."""


@dataclass(slots=True)
class Run:
    """What the phases share."""

    settings: Settings
    model: DemoModel
    device: torch.device
    short: Batches
    long: Batches
    say: Callable[[str], None]
    report: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the products: bfloat16 on a GPU, float32 elsewhere."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def autocast(self) -> torch.autocast:
        """Mixed precision on a GPU, nothing elsewhere."""
        return torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"
        )

    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.started

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def memory_gib(self) -> float:
        """Largest allocation so far."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0


class Clock:
    """Fraction of a phase's seconds that has passed; stands at zero until started."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._start: float | None = None

    def start(self) -> None:
        """Begin to count."""
        self._start = time.monotonic()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return 0.0 if self._start is None else time.monotonic() - self._start

    def fraction(self) -> float:
        """0 to 1 and beyond."""
        return self.elapsed() / self.seconds


def learning_rate(fraction: float, warm_up: float) -> float:
    """Linear warm-up, then linear to zero, as a factor of the peak."""
    if fraction >= 1:
        return 0.0
    return min(1.0, max(fraction, 1e-4) / warm_up) * (
        1 - max(0.0, fraction - warm_up) / (1 - warm_up)
    )


def joint_optimizer(run: Run) -> torch.optim.AdamW:
    """AdamW in three groups: decayed matrices, slow mixer projections, and the rest."""
    matrices, mixers, rest = [], [], []
    for name, parameter in run.model.named_parameters():
        if name.endswith("_fn"):
            mixers.append(parameter)
        elif parameter.dim() >= 2 and not any(s in name for s in ("embed", "lm_head", "conv1d")):
            matrices.append(parameter)
        else:
            rest.append(parameter)
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY, "factor": 1.0},
        {"params": mixers, "weight_decay": 0.0, "factor": MIXER_RATE},
        {"params": rest, "weight_decay": 0.0, "factor": 1.0},
    ]
    fused = run.device.type == "cuda"
    return torch.optim.AdamW(
        groups, run.settings.learning_rate, betas=(0.9, 0.95), eps=1e-9, fused=fused
    )


def joint_losses(run: Run, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Trunk and MTP cross-entropy of rows [B, T + 2]."""
    model, loss = run.model, run.model.kernels.next_token_loss
    head, length = model.lm_head.weight, ids.shape[1] - 2
    with run.autocast():
        hidden = model.hidden(ids[:, :length], run.dtype)
        trunk = loss(hidden.flatten(0, 1), head, ids[:, 1 : length + 1].flatten(), run.dtype)
        drafted = model.mtp(model.embed_tokens(ids[:, 1 : length + 1]), hidden, run.dtype)
        mtp = loss(drafted.flatten(0, 1), head, ids[:, 2:].flatten(), run.dtype)
    return trunk, mtp


def joint_phase(run: Run) -> None:
    """Train everything on short rows; in the last ``long_ratio`` of the time every second batch has
    long rows.
    """
    s, model = run.settings, run.model
    optimizer = joint_optimizer(run)
    clock = Clock(s.joint_s)
    model.train()

    def step(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for group in optimizer.param_groups:
            group["lr"] = s.learning_rate * group["factor"] * learning_rate(clock.fraction(), 0.02)
        optimizer.zero_grad(set_to_none=True)
        trunk, mtp = joint_losses(run, ids)
        (trunk + s.mtp_weight * mtp).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        balance(model.moes())
        return trunk.detach(), mtp.detach(), norm

    for source in (run.short, run.long):  # compile both row lengths before the clock runs
        for _ in range(WARM_STEPS):
            trunk, mtp, _ = step(source.next())
        run.say(f"joint warm-up: loss {trunk.item():.3f} mtp {mtp.item():.3f}")
    run.synchronize()
    if s.total_s:
        clock.seconds = s.total_s - run.elapsed() - s.mtp_s - s.index_s - RESERVE_S
        if clock.seconds <= 0:
            raise ValueError(
                f"total_s {s.total_s:.0f} leaves the joint phase {clock.seconds:.0f} s after "
                f"{run.elapsed():.0f} s of compiling: raise total_s or shorten the other phases"
            )
    run.say(f"joint starts, {clock.seconds:.0f} s; memory {run.memory_gib():.1f} GiB")
    clock.start()
    steps = long_steps = tokens = 0
    curve = []
    while clock.fraction() < 1:
        is_long = clock.fraction() >= 1 - s.long_ratio and steps % 2 == 0
        ids = (run.long if is_long else run.short).next()
        trunk, mtp, norm = step(ids)
        steps, long_steps = steps + 1, long_steps + is_long
        tokens += ids.shape[0] * (ids.shape[1] - 2)
        if steps % 201 == 0 or steps == 1:
            loss = (round(trunk.item(), 4), round(mtp.item(), 4))
            curve.append({"step": steps, "tokens": tokens, "loss": loss[0], "mtp_loss": loss[1]})
            rate = tokens / clock.elapsed()
            run.say(
                f"joint {steps} loss {loss[0]} mtp {loss[1]} norm {norm.item():.2f} "
                f"{tokens / 1e6:.1f} M tokens {rate:.0f}/s long steps {long_steps}"
            )
    run.synchronize()
    seconds = clock.elapsed()
    run.report["joint"] = {
        "steps": steps,
        "long_steps": long_steps,
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "curve": curve,
    }
    run.say(f"joint done: {steps} steps ({long_steps} long), {tokens} tokens, {seconds:.1f} s")


def balance(moes: Iterable[Any]) -> None:
    """One balancing step of every expert layer."""
    for moe in moes:
        moe.balance()


def trunk_states(run: Run, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Detached target states [B, T, H] of rows [B, T + 2], and embeddings of their next tokens.

    The trunk is frozen by not optimising it: under ``no_grad`` every region would compile anew, and
    compiling costs more of a short run than the saved activations do.
    """
    length = ids.shape[1] - 2
    with run.autocast():
        hidden = run.model.hidden(ids[:, :length], run.dtype).detach()
        return hidden, run.model.embed_tokens(ids[:, 1 : length + 1]).detach()


def mtp_phase(run: Run) -> None:
    """Train the MTP layer on the frozen trunk, ``MTP_DEPTH`` recursive steps for every position at
    once.
    """
    s, model, mtp = run.settings, run.model, run.model.mtp
    model.zero_grad(set_to_none=True)
    fused = run.device.type == "cuda"
    optimizer = torch.optim.AdamW(
        mtp.parameters(), s.mtp_learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused
    )
    batches = (part for _ in itertools.count() for part in run.short.next().split(s.mtp_rows))
    # Row i of step k has a whole chain behind it from i = k - 1 on; the last row has no trunk
    # distribution after it.
    at = torch.arange(SHORT_ROW, device=run.device).repeat(s.mtp_rows)
    keeps = [((at >= k) & (at < SHORT_ROW - 1)).float() for k in range(MTP_DEPTH)]
    weights = torch.tensor([DEPTH_DECAY**k for k in range(MTP_DEPTH)], device=run.device)
    clock = Clock(s.mtp_s)
    steps = -2  # two warm-up steps
    overlap: list[float] = []
    while clock.fraction() < 1:
        if steps == 0:
            run.synchronize()
            clock.start()
            run.say(f"mtp starts; memory {run.memory_gib():.1f} GiB")
        for group in optimizer.param_groups:
            group["lr"] = s.mtp_learning_rate * learning_rate(clock.fraction(), 0.05)
        losses = _draft_losses(run, next(batches), keeps)
        torch.stack([loss for loss, _ in losses]).dot(weights).backward()
        nn.utils.clip_grad_norm_(mtp.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mtp.mlp.balance()
        steps += 1
        if steps % 100 == 0 or steps == 1:
            overlap = [round(o.item(), 3) for _, o in losses]
            run.say(f"mtp {steps} overlap by depth {overlap}")
    run.synchronize()
    tokens = steps * s.mtp_rows * SHORT_ROW
    run.report["mtp"] = {
        "steps": steps,
        "tokens": tokens,
        "seconds": round(clock.elapsed(), 1),
        "last_logged_overlap": overlap,
    }
    run.say(f"mtp done: {steps} steps, {tokens} tokens")


def _draft_losses(run: Run, ids: Tensor, keeps: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Loss and overlap by depth; row i aims at the trunk's distribution of token i + 2."""
    model = run.model
    model.eval()  # the trunk's expert loads do not count in this phase
    hidden, embedded = trunk_states(run, ids)
    model.mtp.train()
    head = model.lm_head.weight.detach()
    following = torch.cat([hidden[:, 1:], hidden[:, -1:]], 1).flatten(0, 1)
    with run.autocast():
        logits = F.linear(following.to(run.dtype), head.to(run.dtype))
        outs = model.mtp.unroll(embedded, hidden, run.dtype, MTP_DEPTH)
        return [
            model.kernels.draft_loss(
                out.flatten(0, 1), head, DraftTarget(logits, ids[:, 2:].flatten(), keep), run.dtype
            )
            for out, keep in zip(outs, keeps, strict=True)
        ]
