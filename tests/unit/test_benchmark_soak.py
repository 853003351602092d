"""The soak's parts: memory and counters read, traffic accounted for, leaks and losses seen."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.serving import soak
from benchmarks.serving.memory import (
    Memory,
    MemorySample,
    MemorySampler,
    process_label,
    read_memory,
    slope_per_s,
    tree_memory,
)
from benchmarks.serving.soak_load import Ledger, Outcome, Traffic, refusals
from benchmarks.serving.workload import load_prompts
from benchmarks.support.results import metric_at, write_result
from flare_ray.contracts.messages import Failed
from flare_ray.frontend.tokenizer import TextCodec
from flare_ray.metrics import names
from flare_ray.metrics.exposition import Exposition
from flare_ray.metrics.recorder import Recorder
from tests.support.benchmark_service import MODEL, exposition, routes, write_prompts
from tests.support.chat_checkpoint import CHAT, write_chat_checkpoint
from tests.support.fake_engine_client import answer


@pytest.fixture(scope="module")
def codec(tmp_path_factory) -> TextCodec:
    return TextCodec(write_chat_checkpoint(tmp_path_factory.mktemp("checkpoint")), CHAT)


@pytest.fixture(scope="module")
def prompts(codec, tmp_path_factory):
    folder = write_chat_checkpoint(tmp_path_factory.mktemp("prompts"))
    return load_prompts(write_prompts(folder / "prompts.jsonl", codec), folder)


@pytest.fixture
def serve(codec, free_port):
    with routes(codec, free_port) as run:
        yield run


# Counters.


def test_counters_are_read_back_as_exported_and_subtracted():
    recorder = Recorder("engine", "a")
    width_one = recorder.counter(names.SPEC_LANE_ROUNDS, "1")
    width_two = recorder.counter(names.SPEC_LANE_ROUNDS, "2")
    pass_time = recorder.histogram(names.ROUND_DEVICE_SECONDS, "prefill")
    recorder.gauge(names.PAGES_FREE).set(7)
    width_one.add(3)
    before = exposition(recorder)
    width_one.add(2)
    width_two.add(4)
    pass_time.observe(0.25)
    pass_time.observe(0.5)
    after = exposition(recorder)
    grown = after.since(before)
    assert grown.value(names.SPEC_LANE_ROUNDS) == 6
    assert grown.by_label(names.SPEC_LANE_ROUNDS, "verify_width") == {"1": 2.0, "2": 4.0}
    assert grown.seconds(names.ROUND_DEVICE_SECONDS, {"kind": "prefill"}) == 0.75
    assert grown.observations(names.ROUND_DEVICE_SECONDS, {"kind": "prefill"}) == 2
    assert grown.observations(names.ROUND_DEVICE_SECONDS, {"kind": "decode"}) == 0
    assert after.value(names.PAGES_FREE) == 7


def test_counters_of_several_engines_add_up():
    engines = [Recorder("engine", name) for name in "ab"]
    for engine in engines:
        engine.counter(names.REQUESTS_ADMITTED).add(5)
    assert exposition(*engines).value(names.REQUESTS_ADMITTED) == 10


# Memory.


def test_proportional_set_size_is_read_in_bytes(tmp_path):
    folder = tmp_path / "42"
    folder.mkdir()
    lines = ["00-ff ---p 0 00:00 0 [rollup]", "Rss: 20 kB", "Pss: 9 kB", "Pss_Dirty: 1 kB"]
    lines += ["Pss_Anon: 4 kB", "Pss_File: 3 kB", "Pss_Shmem: 2 kB"]
    (folder / "smaps_rollup").write_text("\n".join(lines))
    assert read_memory(42, tmp_path) == Memory(9 * 1024, 6 * 1024)
    assert read_memory(43, tmp_path) is None


def test_process_without_mappings_has_no_size(tmp_path):
    (tmp_path / "42").mkdir()
    (tmp_path / "42" / "smaps_rollup").write_text("")
    assert read_memory(42, tmp_path) is None


def test_own_tree_has_a_size():
    whole = MemorySample(0.0, tree_memory(os.getpid())).total
    assert 2**20 < whole.allocated_bytes < whole.pss_bytes


@pytest.mark.parametrize(
    ("command", "label"),
    [
        (["ray::ServeReplica:flare:Engine.submit"], "ServeReplica:flare:Engine"),
        (["ray::IDLE"], "IDLE"),
        (["/x/raylet/raylet", "--flag"], "raylet"),
        (["/x/bin/python3.11", "-u", "/y/dashboard/agent.py", "--port=1"], "agent"),
        (["python", "-m", "flare_ray.cli.main", "serve"], "flare_ray.cli.main"),
        (["python"], "python"),
        ([], "kernel"),
    ],
)
def test_process_label_holds_no_id_and_no_path(command, label):
    assert process_label(command) == label


def test_sampler_keeps_the_largest_reading():
    one, five, two = Memory(1, 1), Memory(5, 0), Memory(2, 2)
    readings = iter([{"a": one}, {"a": five, "b": one}, {"a": two}])
    done = threading.Event()

    def read(pid: int) -> dict[str, Memory]:
        found = next(readings, None)
        if found is None:
            done.set()
            return {}
        return found

    with MemorySampler(1, period_s=0.001, read=read) as sampler:
        assert done.wait(5.0)
    assert len(sampler.samples) == 3
    assert sampler.peak.total == Memory(6, 1)


def test_slope_is_that_of_the_line_through_the_readings():
    times = [0.0, 1.0, 2.0, 5.0]
    assert slope_per_s(times, [3 + 2 * t for t in times]) == pytest.approx(2.0)
    assert slope_per_s([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 1.0, 0.0]) == pytest.approx(0.0)
    with pytest.raises(ValueError, match="two times"):
        slope_per_s([1.0, 1.0], [1.0, 2.0])


# The soak.


def test_traffic_accounts_for_every_request_and_expects_every_refusal(serve, prompts):
    # Without any of the stop strings: matching them is the controller's work.
    engine, url = serve(answer("no</think>so it is", pause=0.002))
    traffic = Traffic(url, MODEL, prompts, context_tokens=512)
    asyncio.run(traffic.run(4.0))
    ledger = traffic.ledger
    assert ledger.unaccounted == 0 and ledger.sent > 20
    assert ledger.noted == []
    assert ledger.total("finished") > 0 and ledger.total("cancelled") > 0, ledger.counts
    assert ledger.total("refused") > 0
    deadline = time.monotonic() + 5.0
    while engine.running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not engine.running


def test_every_wrong_request_gets_its_status(serve):
    _, url = serve(answer("x"))
    wrong = refusals(MODEL, 512)
    with httpx.Client(base_url=url) as client:
        got = {
            one.name: client.post(
                one.path, content=one.body, headers={"content-type": "application/json"}
            ).status_code
            for one in wrong
        }
    assert got == {one.name: one.status for one in wrong}


def test_broken_streams_and_vanished_servers_are_lost_requests(serve, prompts, free_port):
    def broken(request):
        return [Failed(request.request_id, "internal_error", "a bug", status=500)]

    _, url = serve(broken)
    for base_url in (url, f"http://127.0.0.1:{free_port()}"):
        traffic = Traffic(base_url, MODEL, prompts, context_tokens=512)
        asyncio.run(traffic.run(1.0))
        assert traffic.ledger.unaccounted == 0
        assert traffic.ledger.total("lost") + traffic.ledger.unexpected > 0
        assert traffic.ledger.total("finished") == 0


def samples(leak_bytes_per_s: float) -> Iterator[MemorySample]:
    """Fifteen minutes; the first three grow fast, as caches fill; later ones carry ever larger
    transients in all readings but every fourth."""
    for t in range(0, 900, 5):
        size = min(t, 180) * 2**20 + int(leak_bytes_per_s * t) + (t % 20 > 0) * t * 2**15
        idle = Memory(2**20, 2**18)
        yield MemorySample(float(t), {"engine": Memory(size + 2**24, size), "idle": idle})


def soak_run(leak_bytes_per_s: float = 0.0, ledger: Ledger | None = None) -> soak.Soak:
    recorder = Recorder("engine", "a")
    recorder.gauge(names.PAGES_TOTAL).set(10)
    recorder.gauge(names.PAGES_FREE).set(10)
    recorder.counter(names.REQUESTS_ADMITTED).add(12)
    recorder.counter(names.REQUESTS_FINISHED, "stop").add(9)
    recorder.counter(names.REQUESTS_FAILED, "cancelled").add(3)
    recorder.counter(names.REQUESTS_FAILED, "overloaded").add(5)
    reading = exposition(recorder)
    readings = tuple(samples(leak_bytes_per_s))
    return soak.Soak(15.0, ledger or Ledger(), readings, reading, reading)


def test_soak_without_a_fault_meets_every_target(tmp_path):
    metrics = soak.soak_metrics(soak_run())
    result = write_result("soak", metrics, soak.BOUNDS, command=["b"], folder=tmp_path)
    assert [t.metric for t in result.targets if not t.met] == []


def test_soak_slope_counts_after_the_warm_up_only():
    metrics = soak.soak_metrics(soak_run(leak_bytes_per_s=2**20 / 30))
    assert metric_at(metrics, "memory_slope_mib_per_min") == pytest.approx(2.0, rel=1e-3)
    assert metric_at(metrics, "allocated_slope_mib_per_min") == pytest.approx(2.0, rel=1e-3)
    by_process = metrics["allocated_slope_by_process_mib_per_min"]
    assert by_process["engine"] == pytest.approx(2.0, rel=1e-2) and by_process["idle"] == 0


def test_soak_sees_lost_unexpected_and_unaccounted_requests():
    ledger = Ledger(sent=4)
    ledger.enter("stream", Outcome("lost", "no end"))
    ledger.enter("refused", Outcome("finished", "stop", expected=False))
    ledger.enter("stream", Outcome("finished", "stop"))
    metrics = soak.soak_metrics(soak_run(ledger=ledger))
    assert metrics["lost_requests"] == 2 and metrics["unexpected_answers"] == 1
    assert metrics["noted"] == ["stream: lost, no end", "refused: finished, stop"]


def test_soak_balance_shows_a_request_that_never_ended():
    run = soak_run()
    admitted_more = Exposition(
        {
            key: value + (key[0] == f"{names.REQUESTS_ADMITTED.name}_total")
            for key, value in run.grown.values.items()
        }
    )
    assert soak.engine_balance(run.grown) == 0
    assert soak.engine_balance(admitted_more) == 1
