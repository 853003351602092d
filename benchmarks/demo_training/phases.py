"""The phases of the runs: trunk and MTP layer; then that layer alone, unrolled on its states."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .captured import Captured
from .family import Family, TokenIds
from .muon import HiddenMatrix, Muon
from .network.functional import DraftTarget
from .pool import Batches
from .settings import Settings
from .shape import MTP_DEPTH, SHORT_ROW, VOCAB_SIZE
from .storage import StoredView

CLIP_NORM = 1.0
WEIGHT_DECAY = 0.1
MIXER_RATE = 0.15
"""Learning-rate factor of a family's ``slow`` matrices, which read all streams: 1,024 inputs of
unit size make Adam's steps large."""
SMALLEST_HIDDEN = 64
DEPTH_DECAY = 0.95
WARM_STEPS = 4
WARM_UP = 0.02
LOGGED_STEPS = 100
PROGRESS_FILE = "progress.json"


@dataclass(slots=True)
class Run:
    """What the phases share.

    Attributes:
        model: the training model of the family.
        export: writes the weights of trunk and drafter.
    """

    settings: Settings
    family: Family
    model: Any
    device: torch.device
    short: Batches
    long: Batches
    say: Callable[[str], None]
    export: Callable[[], None]
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the products: bfloat16 on a GPU, float32 elsewhere."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def autocast(self) -> torch.autocast:
        """Mixed precision on a GPU, nothing elsewhere."""
        return torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"
        )

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def memory_gib(self) -> float:
        """Largest allocation so far."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0


class Clock:
    """Fraction of a phase's seconds that has passed; stands at its beginning until started.

    Args:
        seconds: of the whole phase.
        begun: fraction that an earlier, broken run has done.
    """

    def __init__(self, seconds: float, begun: float = 0.0):
        self.seconds, self.begun = seconds, begun
        self._start: float | None = None

    def start(self) -> None:
        """Begin to count."""
        self._start = time.monotonic()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return 0.0 if self._start is None else time.monotonic() - self._start

    def fraction(self) -> float:
        """0 to 1 and beyond."""
        return self.begun + self.elapsed() / self.seconds

    def remaining(self) -> float:
        """Seconds until the end."""
        return (1 - self.fraction()) * self.seconds


def learning_rate(clock: Clock, warm_up: float = WARM_UP) -> float:
    """Linear warm-up, then linear to zero, as a factor of the peak; resumed, it warms up anew."""
    fraction = clock.fraction()
    if fraction >= 1:
        return 0.0
    warm = min(1.0, max(fraction - clock.begun, 1e-4) / warm_up)
    return warm * (1 - max(0.0, fraction - warm_up) / (1 - warm_up))


class Saver:
    """Writes weights and progress of a running phase every ``save_s`` seconds."""

    def __init__(self, run: Run, phase: str, clock: Clock):
        self._run, self._phase, self._clock = run, phase, clock
        self._last = time.monotonic()

    def maybe(self) -> None:
        """Save where it is time."""
        if time.monotonic() - self._last >= self._run.settings.save_s:
            self.now(self._clock.fraction())

    def now(self, fraction: float) -> None:
        """Save; the weights are whole before the progress speaks of them."""
        self._run.export()
        progress = {"phase": self._phase, "fraction": round(fraction, 4)}
        path = self._run.settings.out / PROGRESS_FILE
        _replace(path, json.dumps(progress | {"report": self._run.report}) + "\n")
        self._run.say(f"{self._phase} saved at {fraction:.2f}")
        self._last = time.monotonic()


def _replace(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text, "utf-8")
    partial.rename(path)


def trunk_optimizers(run: Run) -> list[torch.optim.Optimizer]:
    """Orthogonalised momentum for the hidden matrices; AdamW for small matrices, slow mixer
    projections, embedding, head and the rest. Every group has its ``factor`` of the rate; the rate
    is a tensor, for captured steps.
    """
    family = run.family
    hidden, small, mixers, rest = [], [], [], []
    for name, parameter in run.model.named_parameters():
        if ".indexer." in name:
            continue
        if name.endswith(tuple(family.slow)):
            mixers.append(parameter)
        elif parameter.dim() < 2 or any(s in name for s in family.plain):
            rest.append(parameter)
        elif min(parameter.shape) < SMALLEST_HIDDEN and ".experts_" not in name:
            small.append(parameter)
        else:
            stacked = run.model.num_experts if ".experts_" in name else 1
            hidden.append(HiddenMatrix(parameter, stacked))
    groups = [
        {"params": small, "weight_decay": WEIGHT_DECAY, "factor": 1.0},
        {"params": mixers, "weight_decay": 0.0, "factor": MIXER_RATE},
        {"params": rest, "weight_decay": 0.0, "factor": 1.0},
    ]
    rate, cuda = run.settings.learning_rate, run.device.type == "cuda"
    adam = torch.optim.AdamW(groups, rate, betas=(0.9, 0.95), eps=1e-9, fused=cuda, capturable=cuda)
    muon = Muon(hidden, rate, weight_decay=WEIGHT_DECAY)
    muon.param_groups[0]["factor"] = 1.0
    for group in (*adam.param_groups, *muon.param_groups):
        group["lr"] = torch.tensor(rate, device=run.device)  # a captured step reads it
    return [adam, muon]


@cache
def _marker_weights(
    full: tuple[int, ...], light: tuple[int, ...], prompt_weight: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Ids that begin a part of a document, and by id the weight of what follows."""
    weight = torch.full((VOCAB_SIZE,), prompt_weight)
    weight[list(full)] = 1.0
    return torch.tensor([*full, *light], device=device), weight.to(device)


def token_weights(ids: Tensor, roles: TokenIds, prompt_weight: float) -> Tensor:
    """Loss weight of the token behind every position of ids [B, T]: one inside assistant turns (end
    marker included) and raw text, ``prompt_weight`` elsewhere.
    """
    parts = tuple(roles.full), tuple(roles.light)
    markers, weight = _marker_weights(*parts, prompt_weight, ids.device)
    at = torch.arange(ids.shape[1], device=ids.device)
    last = torch.where(torch.isin(ids, markers), at, -1).cummax(1).values
    known = weight[ids.gather(1, last.clamp(min=0))]
    return known.masked_fill(last < 0, 1.0 if roles.unmarked_full else prompt_weight)


def trunk_loss(run: Run, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss to minimise of rows [B, T + 2], the trunk's plain cross-entropy and the MTP layer's
    weighted one.
    """
    model, s, length = run.model, run.settings, ids.shape[1] - 2
    loss, head = model.kernels.next_token_loss, model.lm_head.weight
    roles, extra = run.family.ids, run.family.extra_loss
    weights = token_weights(ids[:, : length + 1], roles, s.prompt_weight)
    with run.autocast():
        hidden = model.hidden(ids[:, :length], run.dtype)
        targets, place = ids[:, 1 : length + 1].flatten(), weights[:, :length].flatten()
        told = model.readout(hidden, run.dtype).flatten(0, 1)
        weighted, plain = loss(told, head, targets, place, run.dtype)
        drafted = model.mtp(model.embed_tokens(ids[:, 1 : length + 1]), hidden, run.dtype)
        targets, place = ids[:, 2:].flatten(), weights[:, 1:].flatten()
        told = model.mtp.readout(drafted, run.dtype).flatten(0, 1)
        mtp, _ = loss(told, head, targets, place, run.dtype)
    total = weighted + s.mtp_weight * mtp
    return total if extra is None else total + extra(model), plain, mtp.detach()


def _trunk_step(run: Run, clock: Clock) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """One optimiser step of the trunk on rows [B, T + 2]; gives both losses, detached."""
    s, model = run.settings, run.model
    optimizers = trunk_optimizers(run)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    trained = [p for group in groups for p in group["params"]]
    view = StoredView(model, [n for n, _ in model.named_parameters()], run.family.stored_format)
    model.train()
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)  # one place for all captured steps

    def gradients(ids: Tensor) -> tuple[Tensor, ...]:
        torch._foreach_zero_([p.grad for p in trained])
        loss, plain, mtp = trunk_loss(run, ids)
        loss.backward()
        return plain.detach(), mtp

    def update() -> tuple[Tensor, ...]:
        nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        for optimizer in optimizers:
            optimizer.step()
        run.family.after_step(model.moes())
        return ()

    gradients_of, updated = Captured(gradients, run.device), Captured(update, run.device)

    def step(ids: Tensor) -> tuple[Tensor, Tensor]:
        for group in groups:
            group["lr"].fill_(s.learning_rate * group["factor"] * learning_rate(clock))
        with view.seen(clock.fraction() >= 1 - s.rounded_ratio):
            plain, mtp = gradients_of(ids)
        updated()
        return plain, mtp

    return step


def trunk_phase(run: Run, begun: float = 0.0) -> None:
    """Train target and MTP layer on short rows; in the last ``long_ratio`` of the time every second
    batch has long rows, in the last ``rounded_ratio`` products see the weights as they will be
    stored.
    """
    s, clock = run.settings, Clock(run.settings.trunk_s, begun)
    step = _trunk_step(run, clock)
    for source in (run.short, run.long):  # compile both row lengths before the clock runs
        for _ in range(WARM_STEPS):
            plain, _ = step(source.next())
        run.say(f"trunk warm-up: loss {plain.item():.3f}")
    run.synchronize()
    run.say(f"trunk starts, {clock.remaining():.0f} s; memory {run.memory_gib():.1f} GiB")
    saver = Saver(run, "trunk", clock)
    clock.start()
    steps = long_steps = tokens = 0
    waited = 0.0
    curve = []
    while clock.fraction() < 1:
        is_long = clock.fraction() >= 1 - s.long_ratio and steps % 2 == 0
        before = time.monotonic()
        ids = (run.long if is_long else run.short).next()
        waited += time.monotonic() - before
        plain, mtp = step(ids)
        steps, long_steps = steps + 1, long_steps + is_long
        tokens += ids.shape[0] * (ids.shape[1] - 2)
        if steps % LOGGED_STEPS == 0 or steps == 1:
            loss = (round(plain.item(), 4), round(mtp.item(), 4))
            curve.append({"step": steps, "tokens": tokens, "loss": loss[0], "mtp_loss": loss[1]})
            run.say(
                f"trunk step {steps} loss {loss[0]} mtp {loss[1]} {tokens / 1e6:.1f} M tokens "
                f"{tokens / clock.elapsed():.0f}/s long {long_steps} waited {waited:.1f} s "
                f"eta {clock.remaining():.0f} s"
            )
        saver.maybe()
    run.synchronize()
    run.report["trunk"] = {
        "steps": steps,
        "long_steps": long_steps,
        "tokens": tokens,
        "seconds": round(clock.elapsed(), 1),
        "waited_s": round(waited, 1),
        "begun": begun,
        "curve": curve,
    }
    run.say(f"trunk done: {steps} steps ({long_steps} long), {tokens} tokens")
    saver.now(1.0)


def trunk_names(model: nn.Module) -> list[str]:
    """Parameters of the target."""
    return [name for name, _ in model.named_parameters() if not name.startswith("mtp.")]


def trunk_states(run: Run, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Detached target states [B, T, H] of rows [B, T + 2], and embeddings of their next tokens.

    The trunk is frozen by not optimising it: under ``no_grad`` every region would compile anew, and
    compiling costs more of a short run than the saved activations do.
    """
    length = ids.shape[1] - 2
    with run.autocast():
        hidden = run.model.hidden(ids[:, :length], run.dtype).detach()
        return hidden, run.model.embed_tokens(ids[:, 1 : length + 1]).detach()


def _draft_batches(run: Run, sampled: Tensor) -> Iterator[Tensor]:
    """Rows for the drafter, half from the corpus and half written by the trunk itself."""
    count = run.settings.mtp_rows
    while True:
        for part in run.short.next().split(count):
            yield part
            if len(sampled):
                at = torch.randint(len(sampled), (count,), device=run.device)
                yield sampled[at].long()


def depth_masks(rows: int, device: torch.device) -> list[Tensor]:
    """[rows T] float for every depth, zero where a row has no meaning.

    Row i of step k has a whole chain behind it from i = k - 1 on; the last row has no trunk
    distribution after it.
    """
    at = torch.arange(SHORT_ROW, device=device).repeat(rows)
    return [((at >= k) & (at < SHORT_ROW - 1)).float() for k in range(MTP_DEPTH)]


def drafter_phase(run: Run, sampled: Tensor, begun: float = 0.0) -> None:
    """Train the MTP layer on the frozen trunk, ``MTP_DEPTH`` recursive steps for every position at
    once.

    Args:
        run: the run; its trunk has the weights that will be served.
        sampled: [R, T + 2] rows that the trunk wrote, perhaps none.
        begun: fraction that an earlier run has done.
    """
    s, model, mtp = run.settings, run.model, run.model.mtp
    model.zero_grad(set_to_none=True)
    fused = run.device.type == "cuda"
    trained = [p for name, p in mtp.named_parameters() if ".indexer." not in name]
    optimizer = torch.optim.AdamW(
        trained, s.mtp_learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused
    )
    batches = _draft_batches(run, sampled)
    keeps = depth_masks(s.mtp_rows, run.device)
    weights = torch.tensor([DEPTH_DECAY**k for k in range(MTP_DEPTH)], device=run.device)
    names = [f"mtp.{name}" for name, _ in mtp.named_parameters()]
    view = StoredView(model, names, run.family.stored_format)
    clock = Clock(s.drafter_s, begun)
    saver = Saver(run, "drafter", clock)
    steps = -2  # two warm-up steps
    curve = []
    while clock.fraction() < 1:
        if steps == 0:
            run.synchronize()
            clock.start()
            run.say(f"drafter starts, {clock.remaining():.0f} s; memory {run.memory_gib():.1f} GiB")
        for group in optimizer.param_groups:
            group["lr"] = s.mtp_learning_rate * learning_rate(clock, 0.05)
        with view.seen(clock.fraction() >= 1 - s.rounded_ratio):
            losses = _draft_losses(run, next(batches), keeps)
            torch.stack([loss for loss, _ in losses]).dot(weights).backward()
        nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.family.after_step([mtp.mlp])
        steps += 1
        if steps % LOGGED_STEPS == 0 or steps == 1:
            overlap = [round(o.item(), 3) for _, o in losses]
            curve.append({"step": steps, "overlap": overlap})
            rate = steps * s.mtp_rows * SHORT_ROW / max(clock.elapsed(), 1e-3)
            run.say(
                f"drafter step {steps} overlap {overlap} {rate:.0f} tokens/s "
                f"eta {clock.remaining():.0f} s"
            )
        saver.maybe()
    run.synchronize()
    run.report["drafter"] = {
        "steps": steps,
        "tokens": steps * s.mtp_rows * SHORT_ROW,
        "seconds": round(clock.elapsed(), 1),
        "begun": begun,
        "curve": curve,
    }
    run.say(f"drafter done: {steps} steps")
    saver.now(1.0)


def _draft_losses(run: Run, ids: Tensor, keeps: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Loss and overlap by depth; row i aims at the trunk's distribution of token i + 2."""
    model = run.model
    model.eval()  # the trunk's expert loads do not count in this phase
    hidden, embedded = trunk_states(run, ids)
    model.mtp.train()
    head = model.lm_head.weight.detach()
    with run.autocast():
        told = model.readout(hidden, run.dtype).detach()
        following = torch.cat([told[:, 1:], told[:, -1:]], 1).flatten(0, 1)
        logits = F.linear(following.to(run.dtype), head.to(run.dtype))
        outs = model.mtp.unroll(embedded, hidden, run.dtype, MTP_DEPTH)
        return [
            model.kernels.draft_loss(
                model.mtp.readout(out, run.dtype).flatten(0, 1),
                head,
                DraftTarget(logits, ids[:, 2:].flatten(), keep),
                run.dtype,
            )
            for out, keep in zip(outs, keeps, strict=True)
        ]
