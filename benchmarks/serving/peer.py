"""The peer: transformers' `generate` with its cache, on the same weights, prompts and sampling.

It runs alone in its process. Only the `generate` call is timed: tokenising and turning tokens into
text, which the service's time includes, cost the peer nothing. It has no drafter: no class of
transformers loads the checkpoint's.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.workload import Prompt

THREAD_COUNTS = (1, 2)


@dataclass(frozen=True, slots=True)
class PeerJob:
    """What the peer runs.

    Attributes:
        trial: prompts that every thread count runs, taking turns.
        rest: prompts that only the faster thread count runs.
    """

    checkpoint: Path
    trial: tuple[Prompt, ...]
    rest: tuple[Prompt, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class PeerRun:
    """One `generate` call."""

    category: str
    place: int
    threads: int
    completion_tokens: int
    total_s: float


@dataclass(frozen=True, slots=True)
class PeerResult:
    """Every call; `threads` is the faster count over the trial's prompts."""

    runs: tuple[PeerRun, ...]
    threads: int

    def tokens_per_s(self, threads: int) -> float:
        """Over all calls with that many threads."""
        return rate([run for run in self.runs if run.threads == threads])


def rate(runs: Sequence[PeerRun]) -> float:
    """Completion tokens a second."""
    return sum(run.completion_tokens for run in runs) / sum(run.total_s for run in runs)


def run_peer(job: PeerJob) -> PeerResult:
    """Generate for every prompt; call it in a process of its own.

    Raises:
        BenchmarkFailure: transformers misses a text tensor of the checkpoint.
    """
    # Not at the top: the benchmark's own process stays without torch.
    from benchmarks.support.float32_checkpoint import write_float32

    with tempfile.TemporaryDirectory(prefix="flare-peer-") as folder:
        write_float32(job.checkpoint, Path(folder))
        peer = _Peer(Path(folder), job.max_tokens)
    for threads in THREAD_COUNTS:  # first calls allocate and choose kernels
        peer.generate(job.trial[0], threads, max_tokens=8)
    runs = []
    for turn, prompt in enumerate(job.trial):
        order = THREAD_COUNTS if turn % 2 == 0 else THREAD_COUNTS[::-1]
        runs += [peer.generate(prompt, threads) for threads in order]
    best = max(THREAD_COUNTS, key=lambda n: rate([run for run in runs if run.threads == n]))
    runs += [peer.generate(prompt, best) for prompt in job.rest]
    return PeerResult(tuple(runs), best)


class _Peer:
    """A loaded model."""

    def __init__(self, folder: Path, max_tokens: int) -> None:
        self._model = load_peer(folder)
        self._max_tokens = max_tokens
        self._sampling = sampling_defaults(folder)

    def generate(self, prompt: Prompt, threads: int, *, max_tokens: int | None = None) -> PeerRun:
        """One timed call."""
        import torch

        torch.set_num_threads(threads)
        torch.manual_seed(prompt.seed)
        ids = torch.tensor([prompt.ids])
        started_s = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens or self._max_tokens,
                use_cache=True,
                **self._sampling,
            )
        total_s = time.perf_counter() - started_s
        tokens = output.shape[1] - ids.shape[1]
        return PeerRun(prompt.category, prompt.place, threads, tokens, total_s)


def load_peer(folder: Path) -> Any:
    """The library's model of a float32 checkpoint.

    Raises:
        BenchmarkFailure: transformers misses a text tensor of it.
    """
    import torch
    import transformers

    # It would list the drafter's tensors and missing kernels at length; what matters of it is
    # checked below.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = getattr(transformers, config["architectures"][0])
    model, info = architecture.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    model.eval()
    missing = [name for name in info["missing_keys"] if "visual" not in name]
    if missing:
        raise BenchmarkFailure(f"transformers misses {missing[:3]} of the checkpoint")
    return model


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """The checkpoint's defaults with everything unnamed switched off: the library's own defaults
    would cut to 50 tokens."""
    stored = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    return {
        "do_sample": True,
        "temperature": stored.get("temperature", 1.0),
        "top_p": stored.get("top_p", 1.0),
        "top_k": stored.get("top_k", 0),
    }
