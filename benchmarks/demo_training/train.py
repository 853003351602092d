"""Trains one part of the demo checkpoint on one GPU: ``python -m benchmarks.demo_training.train
{trunk,drafter} PACK OUT [options]``.

``trunk`` trains the target, the MTP layer beside it, and the target's index scorers; ``drafter``
draws text from that target and trains the MTP layer on, unrolled, and its scorer. Each is a process
of its own, within ten minutes, and leaves shards of at most 14 MiB in OUT (``assemble`` joins them)
beside its log and report. A part that was broken off goes on from its shards when it is started
again with ``--resume FOLDER`` (a copy of that OUT). On a host without a GPU the same code runs in
float32, for tests of the pipeline.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.support.results import describe_machine

from .assemble import load_shards
from .corpus import load_corpus, package_licences
from .family import Family, family_of
from .generation import continued
from .generators import LONG_SHARES, TOKEN_SHARES
from .heldout import write_held_out
from .index_phase import index_phase
from .phases import PROGRESS_FILE, Clock, Run, drafter_phase, trunk_names, trunk_phase
from .pool import Batches, start_producers, stop_producers
from .settings import Settings, add_options, settings_of
from .shape import MTP_DEPTH, SHORT_ROW, TOP_P
from .speculative import Sampling
from .storage import round_in_place

SHARD_BYTES = 14 * 2**20
PARTS = ("trunk", "drafter")
SAMPLED_PREFIXES = (48, 96, 192, 384)
"""Corpus tokens in front of text that the trunk writes."""


def export(model: Any, folder: Path, family: Family) -> None:
    """Write the published tensors of each part as ``PART-0.safetensors``, ..., each within
    ``SHARD_BYTES`` and whole from the moment it has its name.
    """
    for part in PARTS:
        _export(model, folder, part, family)


def _export(model: Any, folder: Path, part: str, family: Family) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for key, tensor in family.to_published(model).items():
        if family.is_drafter(model, key) != (part == "drafter"):
            continue
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
    for i, shard in enumerate(shards):
        partial_file = folder / f"writing-{part}-{i}"
        save_file(shard, partial_file, metadata={"format": "pt"})
        partial_file.rename(folder / f"{part}-{i}.safetensors")


def logger(path: Path) -> Callable[[str], None]:
    """A function that prints a line with the seconds since now and appends it to ``path``."""
    start = time.monotonic()

    def say(text: str) -> None:
        line = f"[{time.monotonic() - start:7.1f}] {text}"
        print(line, flush=True)
        with path.open("a") as f:
            f.write(line + "\n")

    return say


def versions() -> dict[str, str]:
    """Software and device of the run."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"python": platform.python_version(), "torch": torch.__version__, "device": device}


def write_corpus_report(settings: Settings) -> None:
    """Write ``corpus.json``: what one producer of this run read; every producer reads another
    choice of files. Runs in its own process beside the training.
    """
    corpus = load_corpus(
        settings.pack, "train", max_files=settings.files, seed=settings.seed * 1000 + 999
    )
    report = {
        "files": len(corpus.code),
        "functions": len(corpus.functions),
        "docs": len(corpus.docs),
        "docs_characters": sum(map(len, corpus.docs)),
        "prose": len(corpus.prose),
        "prose_characters": sum(map(len, corpus.prose)),
        "docstrings": len(corpus.docstrings),
        "docstring_characters": sum(map(len, corpus.docstrings)),
        "characters_by_package": dict(sorted(corpus.characters.items(), key=lambda x: -x[1])),
        "licences": package_licences(),
    }
    _write_json(settings.out / "corpus.json", report)


def side_processes(settings: Settings) -> list[BaseProcess]:
    """Start the writers of held-out data and of the corpus report."""
    context = get_context("fork")
    side: list[BaseProcess] = [
        context.Process(target=f, args=(settings,)) for f in (write_held_out, write_corpus_report)
    ]
    for process in side:
        process.start()
    return side


def train(part: str, settings: Settings, resume: Path | None) -> None:
    """One part, from producers to shards and report."""
    settings.out.mkdir(parents=True, exist_ok=True)
    say = logger(settings.out / f"log-{part}.txt")
    producers = start_producers(settings)
    side = side_processes(settings) if part == "trunk" else []
    try:
        run = _run(settings, say)
        run.report |= {
            "settings": {k: str(v) for k, v in dataclasses.asdict(settings).items()},
            "versions": versions(),
            "machine": describe_machine().model_dump(),
            "shares": TOKEN_SHARES,
            "long_shares": LONG_SHARES,
        }
        say(f"{run.report['versions']} {run.report['settings']}")
        (_trunk if part == "trunk" else _drafter)(run, resume)
    finally:
        stop_producers(settings, producers)
    _write_json(settings.out / f"report-{part}.json", run.report)
    for process in side:
        process.join()
        if process.exitcode:
            raise RuntimeError(
                f"the held-out or corpus process ended with {process.exitcode}: see its error above"
            )
    say(f"{part} finished")


def _run(settings: Settings, say: Callable[[str], None]) -> Run:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")  # TF32 for the products of mixer and delta rule
    torch.manual_seed(settings.seed)
    family, compiled = family_of(settings.family), settings.backend != "none"
    kernels = family.kernels(settings.backend) if compiled else None
    model = family.network(family.text_config(), kernels).to(device)
    short = Batches(settings, "short", settings.rows, device)
    long = Batches(settings, "long", settings.long_rows, device)
    write = partial(export, model, settings.out, family)
    run = Run(settings, family, model, device, short, long, say, write)
    total, mtp = (sum(p.numel() for p in m.parameters()) for m in (model, model.mtp))
    run.report["parameters"] = {"total": total, "target": total - mtp, "mtp": mtp}
    return run


def _begun(part: str, resume: Path | None) -> float:
    """Fraction of a part that the run in ``resume`` has done."""
    path = resume / PROGRESS_FILE if resume else None
    if path is None or not path.exists():
        return 0.0
    progress = json.loads(path.read_text())
    return float(progress["fraction"]) if progress["phase"] == part else 0.0


def _trunk(run: Run, resume: Path | None) -> None:
    begun = _begun("trunk", resume)
    if resume and begun:
        run.family.from_published(
            run.model, load_shards(resume, "trunk") | load_shards(resume, "drafter")
        )
        run.say(f"trunk resumed at {begun:.2f}")
    if begun < 1:
        trunk_phase(run, begun)
    names = trunk_names(run.model)
    round_in_place(run.model, names, run.family.stored_format)
    index_phase(run, run.model.attentions(), [n for n in names if ".indexer." in n])
    run.export()


def _drafter(run: Run, resume: Path | None) -> None:
    model, out = run.model, run.settings.out
    begun = _begun("drafter", resume)
    source = resume if resume and begun else out
    run.family.from_published(model, load_shards(out, "trunk") | load_shards(source, "drafter"))
    run.say(f"drafter begins at {begun:.2f}")
    round_in_place(model, trunk_names(model), run.family.stored_format)
    if begun < 1:
        drafter_phase(run, sampled_rows(run), begun)
    names = [f"mtp.{name}" for name, _ in model.mtp.named_parameters()]
    round_in_place(model, names, run.family.stored_format)
    index_phase(run, [model.mtp.self_attn], [n for n in names if ".indexer." in n])
    run.export()


def sampled_rows(run: Run) -> Tensor:
    """Rows [R, T + 2] int32 that begin with corpus text and go on as the trunk writes at
    temperature one, as many as ``sample_s`` allows. The default sampling would write loops.
    """
    plain = run.family.network(run.model.config).to(run.device)
    plain.load_state_dict(run.model.state_dict())
    sampling = Sampling(1.0, TOP_P, MTP_DEPTH, SHORT_ROW, frozenset())
    clock = Clock(run.settings.sample_s)
    waiting = run.short.next()  # the producers read their texts first
    clock.start()
    parts = [torch.zeros(0, SHORT_ROW + 2, dtype=torch.int32, device=run.device)]
    own = 0
    while clock.fraction() < 1:
        given = SAMPLED_PREFIXES[(len(parts) - 1) % len(SAMPLED_PREFIXES)]
        more = [run.short.next() for _ in range(-(-run.settings.sample_rows // len(waiting)) - 1)]
        begin = torch.cat([waiting, *more])[: run.settings.sample_rows, :given]
        waiting = run.short.next()
        rows = continued(partial(run.family.session, plain), begin, SHORT_ROW + 2, sampling)
        parts.append(rows.int())
        own += rows.shape[0] * (rows.shape[1] - given)
        run.say(f"trunk wrote {own / 1e6:.2f} M tokens, {own / clock.elapsed():.0f}/s")
        if clock.elapsed() * len(parts) / max(len(parts) - 1, 1) > clock.seconds:
            break  # one more batch would not fit
    run.report["sampled"] = {"rows": sum(map(len, parts)), "trunk_tokens": own}
    run.report["sampled"]["seconds"] = round(clock.elapsed(), 1)
    return torch.cat(parts)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("part", choices=PARTS)
    add_options(parser)
    parser.add_argument("--resume", type=Path, help="OUT of the run that was broken off")
    args = parser.parse_args()
    train(args.part, settings_of(args), args.resume)


if __name__ == "__main__":
    main()
