"""``python -m benchmarks.workload.peers``: transformers' `generate` beside the engine, in one run.

The frozen workload through the same runner: the adaptive engine of this process, `generate` with
its cache, and `generate` with prompt lookup where the library runs it on the architecture. Same
weights (dequantised once, float32), prompts, sampling defaults, threads and output lengths (every
answer runs to its budget); the library draws its own samples, so texts differ. Only `generate` is
timed: tokenising costs the peer nothing.

No other engine is compared on a GPU: none that serves these architectures could be run on one here.
`transformers serve` needs packages that this project does not install; point
`flare-ray workload run --url peer=URL` at it, or at any other server, for the same measurement.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from pydantic import JsonValue
from rich.console import Console

from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.peer import load_peer, sampling_defaults
from benchmarks.support.float32_checkpoint import write_float32
from benchmarks.support.results import conclude, running_command
from benchmarks.workload.arms import ADAPTIVE, CHECKPOINT, ENGINE, started
from flare_ray.metrics.exposition import Exposition
from flare_ray.workload.arrivals import parse_arrivals
from flare_ray.workload.endpoints import EndpointError, Reply, Request
from flare_ray.workload.engine import parse_answer
from flare_ray.workload.environment import describe
from flare_ray.workload.items import Answer
from flare_ray.workload.records import ArmStart, Header, Journal
from flare_ray.workload.runner import Arm, Runner, RunSettings
from flare_ray.workload.source import load_workload
from flare_ray.workload.summary import ALL, cell_of, ratio_between, read_run
from flare_ray.workload.tokens import Encoder

RESULT = "peers"
PLAIN, LOOKUP = "generate", "generate-prompt-lookup"
LOOKUP_TOKENS = 5
SETTINGS = RunSettings(
    categories=("tool_json", "edit", "reasoning", "chat"),
    arrivals=parse_arrivals("closed:1"),
    sessions=4,
    warm=1,
    chunk=2,
    max_tokens=64,
    ignore_eos=True,
)
SMALL = msgspec.structs.replace(SETTINGS, categories=("chat",), sessions=1, max_tokens=8)


class _Clock:
    """A streamer of `generate`: keeps the time of every delivery; the first one is the prompt."""

    def __init__(self) -> None:
        self.put_s: list[float] = []

    def put(self, value: Any) -> None:
        self.put_s.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


class GenerateEndpoint:
    """transformers' `generate` of a float32 checkpoint in this process.

    Args:
        folder: the checkpoint, dequantised.
        options: further arguments of `generate`.
    """

    in_process = True

    def __init__(self, folder: Path, encoder: Encoder, *, options: dict[str, Any]) -> None:
        self._model = load_peer(folder)
        self._sampling = sampling_defaults(folder)
        self._encoder, self._options = encoder, options

    def ask(self, request: Request) -> Reply:
        """See `Endpoint.ask`."""
        import torch

        torch.set_num_threads(ENGINE["threads_per_rank"])
        torch.manual_seed(request.item.settings.seed)
        ids, clock = torch.tensor([request.ids]), _Clock()
        try:
            with torch.inference_mode():
                output = self._model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=request.max_tokens,
                    min_new_tokens=request.max_tokens,
                    use_cache=True,
                    streamer=clock,
                    **self._sampling,
                    **self._options,
                )
        except (ValueError, NotImplementedError, RuntimeError) as error:
            raise EndpointError(f"generate: {type(error).__name__}: {error}") from error
        ended_s = time.perf_counter()
        tokens = output[0, ids.shape[1] :].tolist()
        return Reply(
            answer=self._answer(request, tokens),
            chunk_s=clock.put_s[1:],
            ended_s=ended_s,
            finish_reason="length",
            prompt_tokens=ids.shape[1],
            completion_tokens=len(tokens),
        )

    def counters(self) -> Exposition | None:
        """It has none."""
        return None

    def _answer(self, request: Request, tokens: list[int]) -> Answer:
        return parse_answer(self._encoder, self._encoder.codec.decode(tokens), request.item.tools)


def run_peers(settings: RunSettings, checkpoint: Path, out: Path) -> dict[str, JsonValue]:
    """Run all that run, and give their speeds.

    Raises:
        BenchmarkFailure: the engine, or plain `generate`, did not start.
    """
    encoder = Encoder(checkpoint)
    workload = load_workload(encoder=encoder)
    names = (ADAPTIVE, PLAIN, LOOKUP)
    header = Header(
        workload=workload.name,
        digest=workload.digest,
        arms=names,
        settings=msgspec.to_builtins(settings),
        environment=describe(running_command()),
    )
    folder = out / "float32"
    folder.mkdir(parents=True)
    write_float32(checkpoint, folder)
    sample = next(item for item in workload.items if item.category == settings.categories[0])
    first = Request(item=sample, ids=workload.tokens[sample.item_id], max_tokens=4)
    with Journal(out, header) as journal, started([ADAPTIVE], checkpoint) as running:
        arms = list(running.arms)
        for name, options in ((PLAIN, {}), (LOOKUP, {"prompt_lookup_num_tokens": LOOKUP_TOKENS})):
            described = f"transformers generate, {ENGINE['threads_per_rank']} thread(s), {options}"
            endpoint = GenerateEndpoint(folder, encoder, options=options)
            try:
                endpoint.ask(first)
            except EndpointError as error:
                if name == PLAIN:
                    raise BenchmarkFailure(str(error)) from error
                journal.write(ArmStart(arm=name, described=described, refused=str(error)))
                continue
            arms.append(Arm(name, endpoint, described))
        Runner(journal, settings, tokens=workload.tokens).run(arms, workload.items)
    return _metrics(out)


def _metrics(out: Path) -> dict[str, JsonValue]:
    run = read_run(out)
    found: dict[str, JsonValue] = {}
    for peer in run.arm_names[1:]:
        for category in (ALL, *run.categories):
            ratio = ratio_between(run, ADAPTIVE, peer, category, measure="total")
            if ratio is not None:
                shown: list[JsonValue] = [ratio.ratio, ratio.lower, ratio.upper]
                found[f"adaptive_vs_{peer}_{category}".replace("-", "_")] = shown
    speeds: dict[str, JsonValue] = {
        arm: round(cell_of(run, arm).tokens_per_s, 2) for arm in run.arm_names
    }
    started_as: dict[str, JsonValue] = {arm.arm: arm.described for arm in run.arms}
    return found | {
        "tokens_per_s": speeds,
        "refused": dict(run.refused),
        "arms": started_as,
        "failed_requests": sum(bool(one.error) for one in run.observations),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workload.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--small", action="store_true", help="smoke run; writes no result")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="flare-peers-") as folder:
            settings = SMALL if options.small else SETTINGS
            metrics = run_peers(settings, CHECKPOINT, Path(folder))
    except BenchmarkFailure as failure:
        print(f"peers failed: {failure}", file=sys.stderr)
        return 2
    return conclude(RESULT, metrics, (), Console(), official=not options.small)


if __name__ == "__main__":
    raise SystemExit(main())
