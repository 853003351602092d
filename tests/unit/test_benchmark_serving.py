"""First light's parts: what is sent, counted and judged; no Ray, no model of any size."""

import json
import math
import multiprocessing
import os
import time
from pathlib import Path

import httpx
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from benchmarks.serving import first_light
from benchmarks.serving.acceptance import Acceptance, AcceptanceJob, measure_acceptance
from benchmarks.serving.alone import call_alone
from benchmarks.serving.arms import FirstTokens, ServiceArm
from benchmarks.serving.client import Observation, Pass, StreamReader, run_pass, stream
from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.memory import Memory, MemorySample
from benchmarks.serving.peer import PeerResult, PeerRun
from benchmarks.serving.report import BOUNDS, FirstLight, first_light_metrics, print_tables
from benchmarks.serving.service import open_target, require_free_port, service_environment
from benchmarks.serving.workload import CATEGORIES, CHAT_PATH, TEXT_PATH, load_prompts, mixed
from benchmarks.support.float32_checkpoint import write_float32
from benchmarks.support.results import metric_at, write_result
from flare_ray.contracts.messages import Failed
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.quantiser import quantise_tensors, rounded
from flare_ray.frontend.tokenizer import TextCodec
from flare_ray.metrics import names
from flare_ray.metrics.exposition import Exposition
from flare_ray.metrics.recorder import Recorder
from tests.support.benchmark_service import (
    CALL,
    MODEL,
    PER_CATEGORY,
    TOOLS,
    exposition,
    routes,
    write_prompts,
)
from tests.support.chat_checkpoint import CHAT, write_chat_checkpoint
from tests.support.fake_engine_client import answer
from tests.support.scripted.recipe import DOTTED
from tests.support.scripted_engine import scripted_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_chat_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def codec(checkpoint) -> TextCodec:
    return TextCodec(checkpoint, CHAT)


@pytest.fixture(scope="module")
def prompt_file(codec, tmp_path_factory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", codec)


@pytest.fixture(scope="module")
def prompts(prompt_file, checkpoint):
    return load_prompts(prompt_file, checkpoint)


@pytest.fixture
def serve(codec, free_port):
    with routes(codec, free_port) as run:
        yield run


# The workload.


def test_mixed_set_takes_categories_in_turn_and_seeds_every_prompt(prompts):
    chosen = mixed(prompts, 2)
    assert [prompt.category for prompt in chosen] == [*CATEGORIES, *CATEGORIES]
    assert [prompt.place for prompt in chosen] == [0] * 10 + [1] * 10
    assert len({prompt.seed for prompt in chosen}) == 20


def test_mixed_set_skips_what_another_set_takes(prompts):
    first = {(p.category, p.place) for p in mixed(prompts, 2)}
    assert not first & {(p.category, p.place) for p in mixed(prompts, 1, skip=2)}


def test_mixed_set_refuses_more_prompts_than_there_are(prompts):
    with pytest.raises(BenchmarkFailure, match="4 prompts of chat are needed, the file has 3"):
        mixed(prompts, 3, skip=1)


def test_prompt_file_without_a_category_is_refused(tmp_path, checkpoint, prompt_file):
    lines = [line for line in prompt_file.read_text().splitlines() if '"recall"' not in line]
    path = tmp_path / "short.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(BenchmarkFailure, match="no prompts of recall"):
        load_prompts(path, checkpoint)


def test_conversation_is_sent_as_chat_with_calls_in_openai_form(prompts):
    prompt = prompts["tool"][0]
    body = prompt.body(MODEL, 8)
    [call] = body["messages"][1]["tool_calls"]
    assert prompt.path == CHAT_PATH and body["tools"] == TOOLS
    assert json.loads(call["function"]["arguments"]) == CALL["arguments"]
    assert call["function"]["name"] == "weather" and call["type"] == "function"


def test_raw_text_is_sent_as_completion(prompts):
    prompt = prompts["docs"][1]
    assert prompt.path == TEXT_PATH
    assert prompt.body(MODEL, 8)["prompt"] == "docs number 1"


def test_rendered_effort_becomes_a_parameter(prompts):
    prompt = prompts["chat"][0]
    assert "reasoning_effort" not in prompt.body(MODEL, 8)
    with_effort = type(prompt)(
        "chat", 0, "<|system|>Reasoning Effort: High<|user|>", (1,), 5, prompt.messages
    )
    assert with_effort.body(MODEL, 8)["reasoning_effort"] == "high"


# Clients, against the real routes over a scripted engine.


def body_of(prompt):
    return prompt.body(MODEL, 16)


def test_pass_sends_every_prompt_once_and_counts_the_services_tokens(serve, prompts):
    engine, url = serve(answer("no</think>yes"))
    chosen = mixed(prompts, 1)
    done = run_pass(url, chosen, lanes=4, body_of=body_of)
    assert sorted(p.prompt.category for p in done.observations) == sorted(CATEGORIES)
    assert done.tokens == len(chosen) * (len("no</think>yes") + 1)
    assert {request.sampling.seed for request in engine.requests} == {p.seed for p in chosen}
    assert all(0 < one.first_s <= one.total_s <= done.wall_s for one in done.observations)


def test_pass_keeps_its_lanes_busy_and_tells_once_when_one_runs_dry(serve, prompts):
    open_counts: list[int] = []
    waiting_when_drained: list[int] = []
    script = answer("abc</think>d", pause=0.01)

    def counting(request):
        open_counts.append(len(engine.running))
        return script(request)

    engine, url = serve(script)
    engine.script = counting
    chosen = mixed(prompts, 2)

    def drained() -> None:
        waiting_when_drained.append(len(engine.requests))

    run_pass(url, chosen, lanes=3, body_of=body_of, on_drained=drained)
    assert max(open_counts) == 3
    [arrived] = waiting_when_drained
    # The other lanes' last requests may still be on their way.
    assert len(chosen) - 2 <= arrived <= len(chosen)


def test_stream_with_another_prompt_length_fails_the_run(serve, prompts):
    _, url = serve(answer("x"))
    prompt = prompts["docs"][0]
    body = body_of(prompt) | {"prompt": "something else"}
    with (
        httpx.Client(base_url=url) as client,
        pytest.raises(BenchmarkFailure, match="template and prompt file disagree"),
    ):
        stream(client, prompt, path=TEXT_PATH, body=body)


def test_refused_stream_fails_the_run_with_the_servers_words(serve, prompts):
    _, url = serve(answer("x"))
    prompt = prompts["docs"][0]
    with (
        httpx.Client(base_url=url) as client,
        pytest.raises(BenchmarkFailure, match=r"answered 400.*top_p"),
    ):
        stream(client, prompt, path=TEXT_PATH, body=body_of(prompt) | {"top_p": 0})


def test_error_inside_a_stream_fails_the_run(serve, prompts):
    def broken(request):
        return [Failed(request.request_id, "rank_failure", "rank 0 died", status=503)]

    _, url = serve(broken)
    with pytest.raises(BenchmarkFailure, match="rank 0 died"):
        run_pass(url, mixed(prompts, 1)[:1], lanes=1, body_of=body_of)


def test_reader_counts_chunks_with_output_only():
    reader = StreamReader()
    lines = [
        'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        'data: {"choices": [{"delta": {"reasoning_content": "a"}}]}',
        'data: {"choices": [{"delta": {"tool_calls": [{}]}}]}',
        'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}',
        'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}',
        "data: [DONE]",
    ]
    assert [reader.take(line) for line in lines] == [False, True, True, False, False, False]
    assert (reader.chunks, reader.finish_reason, reader.done) == (2, "stop", True)


# The other arms.


def test_peer_gets_the_same_values_as_float32(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "wide"
    source.mkdir()
    folder.mkdir()
    weights = torch.randn(5, 3, generator=torch.Generator().manual_seed(4)).bfloat16()
    save_file({"w": weights, "ids": torch.arange(3)}, source / "model.safetensors")
    (source / "config.json").write_text('{"architectures": ["X"]}')
    write_float32(source, folder)
    wide = load_file(folder / "model.safetensors")
    assert wide["w"].dtype == torch.float32 and torch.equal(wide["w"], weights.float())
    assert torch.equal(wide["ids"], torch.arange(3))
    assert (folder / "config.json").is_file()


def test_peer_gets_the_dequantised_values_of_a_quantised_checkpoint(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "wide"
    source.mkdir()
    folder.mkdir()
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    stored = quantise_tensors({"a.weight": weight}, lambda *_: WeightFormat.FP8_BLOCK)
    save_file(stored, source / "model.safetensors")
    (source / "config.json").write_text('{"quantization_config": {"quant_method": "modelopt"}}')
    write_float32(source, folder)
    wide = load_file(folder / "model.safetensors")
    assert wide.keys() == {"a.weight"}
    assert torch.equal(wide["a.weight"], rounded(weight, WeightFormat.FP8_BLOCK))
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_acceptance_counts_what_the_rounds_of_a_real_engine_emitted(tmp_path, prompts):
    folder = scripted_checkpoint(tmp_path)
    chosen = {c: [type(p)(c, p.place, p.text, (1, 2, 3), 9) for p in prompts[c]] for c in ("chat",)}
    job = AcceptanceJob(
        engine={
            "recipe": DOTTED,
            "device": "cpu",
            "dtype": "float32",
            "concurrency": 2,
            "context_tokens": 256,
            "prefill_tokens": 64,
        },
        checkpoint=Path(folder),
        prompts=chosen,
        depth=3,
        max_tokens=40,
        temperature=None,
    )
    [found] = measure_acceptance(job).values()
    assert found.rounds > 0
    assert found.emitted <= len(chosen["chat"]) * 39
    assert 1.0 < found.mean_emitted <= 4.0
    assert found.survived[0] >= found.survived[1] >= found.survived[2] > 0
    assert sum(found.survived) == found.accepted


def test_function_runs_in_another_process_and_its_result_comes_back():
    assert call_alone(abs, -3, limit_s=60) == 3
    assert call_alone(os.path.exists, "/", limit_s=60) is True


def test_function_that_fails_alone_fails_the_run():
    with pytest.raises(BenchmarkFailure, match="sqrt failed in its process"):
        call_alone(math.sqrt, -1.0, limit_s=60)


def test_function_that_takes_too_long_is_killed():
    with pytest.raises(BenchmarkFailure, match="sleep did not end within 1 s"):
        call_alone(time.sleep, 600.0, limit_s=1)
    assert multiprocessing.active_children() == []


# What is served.


def test_target_is_the_repositorys_file_unless_something_changes(tmp_path, checkpoint):
    (checkpoint / "config.json").write_text("{}")
    with open_target(checkpoint=checkpoint, port=4321, threads=1) as target:
        assert not target.is_original
        assert target.engine["threads_per_rank"] == 1
        assert target.address == ("127.0.0.1", 4321)
        assert target.checkpoint == checkpoint.resolve()
        copy = target.file
        assert "4321" in copy.read_text()
    assert not copy.exists()


def test_missing_checkpoint_is_named_with_the_option_that_changes_it(tmp_path):
    with (
        pytest.raises(BenchmarkFailure, match="--checkpoint"),
        open_target(checkpoint=tmp_path / "nowhere"),
    ):
        pass


def test_service_environment_leaves_threads_to_each_arm():
    given = {"OMP_NUM_THREADS": "1", "PATH": "/bin", "PYTHONPATH": "/x"}
    made = service_environment(given)
    assert "OMP_NUM_THREADS" not in made and made["PATH"] == "/bin"
    assert made["PYTHONPATH"].endswith(os.pathsep + "/x")


def test_port_in_use_is_refused(serve):
    _, url = serve(answer("x"))
    with pytest.raises(BenchmarkFailure, match="--port"):
        require_free_port("127.0.0.1", int(url.rpartition(":")[2]))


# The report.


def observation(prompt, tokens: int, total_s: float) -> Observation:
    return Observation(prompt, tokens, "stop", total_s / 4, total_s, 3)


def growth(*, cpu_s: float, rounds: int) -> Exposition:
    recorder = Recorder("engine", "a")
    recorder.counter(names.CONTROLLER_CPU).add(cpu_s)
    recorder.counter(names.ROUNDS, "speculative", "4", "6").add(rounds)
    recorder.counter(names.SPEC_LANE_ROUNDS, "6").add(4 * rounds)
    recorder.counter(names.SPEC_EMITTED).add(12 * rounds)
    for _ in range(rounds):
        recorder.histogram(names.ROUND_SECONDS, "speculative").observe(0.02)
        recorder.histogram(names.ROUND_DEVICE_SECONDS, "speculative").observe(0.01)
    return exposition(recorder)


def service_arm(prompts, name: str, tokens: int) -> ServiceArm:
    """Two passes of the full size at each lane count; `tokens` per stream, a second each."""
    arm = ServiceArm(name, (), startups_s=[20.0, 30.0])
    chosen = mixed(prompts, PER_CATEGORY)
    for lanes in (1, 4):
        for _ in range(2):
            seen = tuple(observation(prompt, tokens, 1.0) for prompt in chosen)
            arm.passes[lanes].append(Pass(lanes, seen, len(seen) / lanes))
            arm.rounds[lanes].append(growth(cpu_s=0.004, rounds=10))
    arm.steady += [growth(cpu_s=0.002, rounds=10), growth(cpu_s=0.006, rounds=10)]
    gib, half = Memory(2**30, 2**28), Memory(2**29, 2**28)
    arm.peaks += [MemorySample(0.0, {"a": gib}), MemorySample(1.0, {"a": gib, "b": half})]
    arm.first_tokens += [FirstTokens(0.03, 0.02), FirstTokens(0.05, 0.02), FirstTokens(0.04, 0.02)]
    return arm


@pytest.fixture
def measured(prompts) -> FirstLight:
    runs = tuple(
        PeerRun(prompt.category, prompt.place, threads, 10, 2.0 if threads == 1 else 1.0)
        for prompt in mixed(prompts, PER_CATEGORY)
        for threads in (1, 2)
    )
    counts = {
        category: Acceptance(10, 30 if category == "docs" else 20, 50, 20, (8, 6, 3, 2, 1))
        for category in CATEGORIES
    }
    return FirstLight(
        adaptive=service_arm(prompts, "adaptive drafts", 100),
        off=service_arm(prompts, "no drafts", 50),
        peer=PeerResult(runs, 2),
        sampled=counts,
        greedy=counts,
        settings={"max_tokens": 96},
    )


def test_first_light_figures_follow_from_the_arms(measured):
    metrics = first_light_metrics(measured)
    assert metric_at(metrics, "service.adaptive.b1.tokens_per_s") == 100.0
    assert metric_at(metrics, "service.adaptive.b4.tokens_per_s") == 400.0
    assert metric_at(metrics, "speedup_vs_transformers_b1") == 10.0
    assert metric_at(metrics, "spec_vs_off_b1") == 2.0
    assert metric_at(metrics, "mean_emitted_d5_prose") == 2.5
    assert metric_at(metrics, "mean_emitted_d5_tool") == 2.0
    assert metric_at(metrics, "peak_memory_gib") == 1.5
    assert metric_at(metrics, "controller_ms_per_round_b4") == pytest.approx(0.4)
    assert metric_at(metrics, "ttft_vs_prefill") == pytest.approx(2.0)
    assert metric_at(metrics, "startup_s") == 30.0


def test_first_light_result_of_full_size_fits_its_file(measured, tmp_path):
    metrics = first_light_metrics(measured)
    result = write_result("first_light", metrics, BOUNDS, command=["b"], folder=tmp_path)
    assert {target.metric for target in result.targets} == {bound.metric for bound in BOUNDS}


def test_first_light_prints_both_tables(measured):
    console = Console(width=100, record=True, color_system=None)
    print_tables(measured, console)
    text = console.export_text()
    assert "2 thread(s)" in text and "<- counts" in text and "docs" in text


def test_full_and_quick_sizes_measure_other_prompts_than_they_warm_with(prompts):
    size = first_light.QUICK
    long_text = {
        category: [
            type(p)(p.category, p.place, p.text, tuple(range(80)), 0, p.messages) for p in rows
        ]
        for category, rows in prompts.items()
    }
    work = first_light.make_workload(long_text, size)
    seen = {(p.category, p.place) for p in work.measured}
    assert not seen & {(p.category, p.place) for p in work.warm}
    assert {len(p.ids) for p in work.idle} == {64}
    with pytest.raises(BenchmarkFailure, match="64 tokens are needed"):
        first_light.make_workload(prompts, size)
