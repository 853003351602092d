"""Trains the demo checkpoint on one GPU: ``python -m benchmarks.demo_training.train PACK OUT
[options]``.

Phases: trunk and MTP jointly; the MTP layer alone, unrolled; the index scorers. Then the held-out
    measures. OUT gets shards
of at most 14 MiB (``assemble`` joins them), ``log.txt``, ``summary.json``, ``eval.json`` and
``eval_prompts.jsonl``. On a host without a GPU the same code runs in float32, for tests of the
pipeline.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .assemble import load_shards
from .corpus import load_corpus, package_licences
from .generators import TOKEN_SHARES
from .heldout import teacher_forced, write_held_out
from .index_phase import index_phase
from .network import DemoModel, Kernels, from_published, to_published
from .phases import Run, joint_phase, mtp_phase
from .pool import Batches, start_producers, stop_producers
from .settings import Settings, parse_settings
from .shape import text_config

SHARD_BYTES = 14 * 2**20


def export(model: DemoModel, folder: Path, name: str) -> None:
    """Write the published tensors as ``name-0.safetensors``, ..., each within ``SHARD_BYTES``."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for key, tensor in to_published(model).items():
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
    for i, shard in enumerate(shards):
        save_file(shard, folder / f"{name}-{i}.safetensors", metadata={"format": "pt"})


def build_model(settings: Settings, device: torch.device) -> DemoModel:
    """The model with its seeded initial weights, or those of the run that is resumed."""
    torch.set_float32_matmul_precision(
        "high"
    )  # TF32 for the float32 products of mixer and delta rule
    torch.manual_seed(settings.seed)
    kernels = Kernels() if settings.backend == "none" else Kernels.compiled(settings.backend)
    model = DemoModel(text_config(), kernels)
    if settings.resume:
        from_published(model, load_shards(settings.resume))
    return model.to(device)


def logger(path: Path) -> Callable[[str], None]:
    """A function that prints a line with the seconds since now and appends it to ``path``."""
    start = time.monotonic()

    def say(text: str) -> None:
        line = f"[{time.monotonic() - start:7.1f}] {text}"
        print(line, flush=True)
        with path.open("a") as f:
            f.write(line + "\n")

    return say


def versions(device: torch.device) -> dict[str, str]:
    """Software and device of the run."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {"python": platform.python_version(), "torch": torch.__version__, "device": name}


def machine() -> dict[str, Any]:
    """Processor, cores and memory of the host, and its GPUs."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    models = [t.split(":", 1)[1].strip() for t in cpuinfo.split("\n") if "model name" in t]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "accelerators": gpus,
    }


def corpus_report(settings: Settings) -> dict[str, Any]:
    """What one producer of this run read; every producer reads another random choice of files."""
    corpus = load_corpus(
        settings.pack, "train", max_files=settings.files, seed=settings.seed * 1000 + 999
    )
    return {
        "files": len(corpus.code),
        "functions": len(corpus.functions),
        "docs": len(corpus.docs),
        "docs_characters": sum(map(len, corpus.docs)),
        "docstrings": len(corpus.docstrings),
        "docstring_characters": sum(map(len, corpus.docstrings)),
        "characters_by_package": dict(sorted(corpus.characters.items(), key=lambda x: -x[1])),
        "licences": package_licences(),
    }


def write_corpus_report(settings: Settings) -> None:
    """Write ``corpus.json``; runs in its own process beside the training."""
    _write_json(settings.out / "corpus.json", corpus_report(settings))


def train(settings: Settings) -> None:
    """The whole run."""
    settings.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    say = logger(settings.out / "log.txt")
    producers = start_producers(settings)
    context = get_context("fork")
    side = [
        context.Process(target=f, args=(settings,)) for f in (write_held_out, write_corpus_report)
    ]
    for process in side:
        process.start()
    try:
        run = _trained(settings, say, started)
    finally:
        stop_producers(settings, producers)
    bias = {n: b.tolist() for n, b in run.model.named_buffers() if n.endswith("correction_bias")}
    _write_json(settings.out / "summary.json", run.report | {"router_bias": bias})
    for process in side:
        process.join()
        if process.exitcode:
            raise RuntimeError(
                f"the held-out or corpus process ended with {process.exitcode}: see its error above"
            )
    torch.compiler.set_stance("force_eager")  # few rows: not worth new compiled shapes
    _write_json(settings.out / "eval.json", teacher_forced(run))
    say("finished")


def _trained(settings: Settings, say: Callable[[str], None], started: float) -> Run:
    """Run the phases; shards are written after each, so a broken run leaves the last whole one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(settings, device)
    short = Batches(settings, "short", settings.rows, device)
    long = Batches(settings, "long", settings.long_rows, device)
    run = Run(settings, model, device, short, long, say, started=started)
    total, mtp = (sum(p.numel() for p in m.parameters()) for m in (model, model.mtp))
    run.report |= {
        "settings": {k: str(v) for k, v in dataclasses.asdict(settings).items()},
        "versions": versions(device),
        "machine": machine(),
        "shares": TOKEN_SHARES,
        "parameters": {"total": total, "target": total - mtp, "mtp": mtp},
    }
    if settings.resume:
        previous = json.loads((settings.resume / "summary.json").read_text())
        kept = {k: previous[k] for k in ("settings", "versions", "shares", "joint", "mtp", "index")}
        run.report["earlier"] = [*previous.get("earlier", []), kept]
    say(f"{run.report['parameters']} {run.report['versions']} {run.report['settings']}")
    phases = (
        (joint_phase, settings.total_s or settings.joint_s),
        (mtp_phase, settings.mtp_s),
        (index_phase, settings.index_s),
    )
    for phase, seconds in phases:
        if seconds > 0:
            phase(run)
            export(model, settings.out, "model")
    return run


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    train(parse_settings(__doc__.split("\n", 1)[0]))
