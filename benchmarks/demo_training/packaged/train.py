"""Trains the drafter on what the model wrote, unrolled as deep as it will draft:
``python -m benchmarks.demo_training.packaged.train CHECKPOINT SAMPLED OUT``.

OUT gets `drafter-0.safetensors` (plain, below 14 MiB), progress, log and report; a run that was
broken off goes on from a copy of its OUT with ``--resume``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..muon import HiddenMatrix, Muon
from ..phases import CLIP_NORM, Clock, learning_rate
from ..storage import StoredView
from ..train import logger, versions
from .loss import Aim, DraftLoss
from .model import PackagedModel, drafter_tensors, load_drafter, load_target
from .rows import Texts, packed, read_texts

WEIGHTS_FILE, PROGRESS_FILE = "drafter-0.safetensors", "progress.json"
DEPTH_DECAY = 0.85
WARM_UP = 0.03
LOGGED_S = 5.0
HELD_OUT = 64
"""The last conversation of so many is kept off training, for the teacher-forced measure."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Numbers of a training run.

    Attributes:
        seconds: of the whole run, loading included.
        rows: of a step.
        length: tokens of a row.
        depth: drafts that the training unrolls.
        vocabulary: tokens that the drafter may propose: the most frequent ones that the model
            wrote.
        rate: peak learning rate.
        rounded: last part of the time, where products see the weights as they will be stored.
        save: seconds between two checkpoints.
        seed: of the order of the conversations.
    """

    seconds: float = 180.0
    rows: int = 16
    length: int = 1024
    depth: int = 5
    vocabulary: int = 8192
    rate: float = 2e-3
    rounded: float = 0.15
    save: float = 45.0
    seed: int = 1


@dataclass(slots=True)
class Run:
    """What a training run holds."""

    settings: Settings
    model: PackagedModel
    out: Path
    say: Callable[[str], None]
    clock: Clock
    report: dict[str, Any] = field(default_factory=dict)

    def export(self) -> None:
        """Write the weights; whole from the moment they have their name."""
        partial = self.out / "writing-drafter"
        save_file(drafter_tensors(self.model), partial, metadata={"format": "pt"})
        partial.rename(self.out / WEIGHTS_FILE)
        fraction = min(1.0, round(self.clock.fraction(), 4))
        text = json.dumps({"fraction": fraction, "report": self.report})
        (self.out / PROGRESS_FILE).write_text(text + "\n", "utf-8")


def split(texts: Texts) -> tuple[list[int], list[int]]:
    """Numbers of the conversations to train on, and of the held-out ones."""
    numbers = range(len(texts.ids))
    held = [n for n in numbers if n % HELD_OUT == HELD_OUT - 1]
    return [n for n in numbers if n % HELD_OUT != HELD_OUT - 1], held


def frequent(texts: Texts, numbers: list[int], size: int, vocabulary: int) -> tuple[Tensor, float]:
    """The ``size`` ids that the model wrote most often, and their part of what it wrote."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for n in numbers:
        counts += np.bincount(texts.ids[n][texts.given[n] :], minlength=vocabulary)
    order = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(order), float(counts[order].sum() / max(1, counts.sum()))


def batches(texts: Texts, numbers: list[int], settings: Settings) -> Iterator[tuple[Tensor, ...]]:
    """Endless ids [B, T + 2] and which of them the model wrote, in a new order every epoch."""
    source = np.random.default_rng(settings.seed)
    pool = ThreadPoolExecutor(1)

    def stream() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order, at = source.permutation(numbers).tolist(), 0
        while True:
            ids, own, used = packed(texts, order[at:], settings.rows, settings.length + 2)
            yield ids, own
            at += used
            if at >= len(order):
                order, at = source.permutation(numbers).tolist(), 0

    drawn = stream()
    ahead = pool.submit(next, drawn)
    try:
        while True:
            ids, own = ahead.result()
            ahead = pool.submit(next, drawn)
            yield torch.from_numpy(ids), torch.from_numpy(own)
    finally:
        pool.shutdown()


def draft_loss(model: PackagedModel, ids: Tensor, own: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Loss and overlap [K] of rows [B, T + 2].

    Row i aims at the target's distribution of token i + 2, where the model wrote that token; the
    first rows have no whole chain behind them.

    Raises:
        ValueError: there is no such token.
    """
    length = ids.shape[1] - 2
    with torch.no_grad():
        states = model.hidden(ids[:, : length + 1])
        embedded = model.embed_tokens(ids[:, 1 : length + 1])
    wanted = own[:, 2:].clone()
    wanted[:, :depth] = False
    chosen = wanted.flatten().nonzero().squeeze(1)
    if not len(chosen):
        raise ValueError(f"the model wrote nothing of these rows of {length} tokens: take longer")
    turns = model.turns(torch.arange(length, device=ids.device)[None])
    device = ids.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        outs = model.drafter.unroll(embedded, states[:, :-1], turns, depth)
    rows = torch.stack([out.flatten(0, 1).index_select(0, chosen) for out in outs])
    following = states[:, 1:].flatten(0, 1).index_select(0, chosen)
    weights = torch.tensor([DEPTH_DECAY**k for k in range(depth)], device=ids.device)
    aim = Aim(following, model.embed_tokens.weight, model.tokens, weights)
    loss, overlap = DraftLoss.apply(rows.to(following.dtype), aim)
    return loss, overlap


def optimizers_of(model: PackagedModel, rate: float) -> list[torch.optim.Optimizer]:
    """Orthogonalised momentum for the matrices, AdamW for the norms."""
    parameters = list(model.drafter.parameters())
    matrices = [HiddenMatrix(p) for p in parameters if p.dim() == 2]
    norms = [p for p in parameters if p.dim() == 1]
    adam = torch.optim.AdamW(norms, rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, rate), adam]


def train_steps(run: Run, texts: Texts, numbers: list[int]) -> None:
    """Steps until the time is up."""
    s, model = run.settings, run.model
    device = model.embed_tokens.weight.device
    trained = list(model.drafter.parameters())
    optimizers = optimizers_of(model, s.rate)
    view = StoredView(model.drafter, [n for n, _ in model.drafter.named_parameters()])
    steps = tokens = 0
    said = saved = time.monotonic()
    curve: list[dict[str, Any]] = []

    def note(loss: Tensor, overlap: Tensor) -> None:
        found = [round(x, 3) for x in overlap.tolist()]
        curve.append({"step": steps, "loss": round(loss.item(), 4), "overlap": found})
        rate = tokens / max(run.clock.elapsed(), 1e-3)
        run.say(f"step {steps} loss {loss.item():.4f} overlap {found} {rate:.0f} tokens/s")

    for ids, own in batches(texts, numbers, s):
        fraction = run.clock.fraction()
        if fraction >= 1:
            break
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = s.rate * learning_rate(run.clock, WARM_UP)
        with view.seen(fraction >= 1 - s.rounded):
            loss, overlap = draft_loss(model, ids.to(device), own.to(device), s.depth)
            loss.backward()
        nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        steps, tokens, now = steps + 1, tokens + ids.numel(), time.monotonic()
        if steps <= 2 or now - said > LOGGED_S:
            note(loss, overlap)
            said = now
        if now - saved > s.save:
            run.export()
            saved = now
    if steps > 2:
        note(loss, overlap)
    run.report |= {"steps": steps, "tokens": tokens, "curve": curve}


@torch.no_grad()
def held_out(run: Run, texts: Texts, numbers: list[int]) -> list[float]:
    """Overlap by depth on the held-out conversations, with the weights as they are stored."""
    s, model = run.settings, run.model
    device = model.embed_tokens.weight.device
    view = StoredView(model.drafter, [n for n, _ in model.drafter.named_parameters()])
    ids, own, _ = packed(texts, numbers, s.rows, s.length + 2)
    with view.seen():
        placed = torch.from_numpy(ids).to(device), torch.from_numpy(own).to(device)
        _, overlap = draft_loss(model, *placed, s.depth)
    return [round(x, 4) for x in overlap.tolist()]


def train(
    checkpoint: Path, sampled: Path, out: Path, settings: Settings, resume: Path | None
) -> dict[str, Any]:
    """From the model and its texts to the drafter's weights; returns and writes the report."""
    out.mkdir(parents=True, exist_ok=True)
    say, device = logger(out / "log-train.txt"), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda")
    begun = json.loads((resume / PROGRESS_FILE).read_text())["fraction"] if resume else 0.0
    clock = Clock(settings.seconds, begun)
    clock.start()
    torch.manual_seed(settings.seed)
    texts = read_texts(sampled)
    numbers, held = split(texts)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_target(checkpoint, device, dtype)
    vocabulary = model.config["vocab_size"]
    tokens, share = frequent(texts, numbers, settings.vocabulary, vocabulary)
    model.choose(tokens)
    if resume:
        load_drafter(model, load_file(resume / WEIGHTS_FILE))
    run = Run(settings, model, out, say, clock)
    run.report |= {
        "settings": asdict(settings),
        "versions": versions(),
        "conversations": len(numbers),
        "written": texts.written(),
        "drafted_share": round(share, 4),
        "begun": begun,
    }
    say(f"loaded after {clock.elapsed():.1f} s: {run.report}")
    train_steps(run, texts, numbers)
    run.export()
    if held:
        run.report["held_out_overlap"] = held_out(run, texts, held)
    run.report["seconds"] = round(clock.elapsed(), 1)
    (out / "report-train.json").write_text(json.dumps(run.report, indent=1) + "\n", "utf-8")
    say(f"done: {run.report['steps']} steps, held out {run.report.get('held_out_overlap')}")
    return run.report


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="train a drafter for a packaged model")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("sampled", type=Path, help="OUT of `sample`")
    parser.add_argument("out", type=Path)
    parser.add_argument("--resume", type=Path, help="OUT of the run that was broken off")
    for name, default in asdict(Settings()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    settings = Settings(**{name: getattr(args, name) for name in asdict(Settings())})
    train(args.checkpoint, args.sampled, args.out, settings, args.resume)


if __name__ == "__main__":
    main()
