"""The HTTP benchmark at a small size: its clocks, its parts, and what it must catch."""

import asyncio
import io

import pytest
from rich.console import Console

from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.http import (
    BOUNDS,
    CHECKPOINT,
    Leaving,
    Plan,
    Turn,
    metrics_of,
    run,
)
from benchmarks.serving.http_engine import STAMP_RANGE_US, age_us, stamp_of
from benchmarks.serving.http_load import Latencies, read_streams
from benchmarks.support.results import metric_at

SMALL = Plan(streams=8, rate=20.0, turns=1, seconds=1.0, disconnects=40)


@pytest.mark.parametrize("sent", [0, 63, 64, 12_345_678_901, STAMP_RANGE_US - 1])
@pytest.mark.parametrize("late", [0, 1, 40_000])
def test_a_stamp_tells_how_long_ago_it_was_made(sent, late):
    assert age_us(stamp_of(sent), sent + late) == late


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_small_run_measures_both_arms_and_leaves_nothing_open():
    metrics = run(SMALL, CHECKPOINT, Console(file=io.StringIO()))
    assert metrics["left_open"] == 0
    for bound in BOUNDS:
        metric_at(metrics, bound.metric)  # raises where nothing was measured
    for turns in metrics["turns"].values():
        assert all(0 < turn["p50_ms"] <= turn["p99_ms"] for turn in turns)
        assert all(turn["server_cpu_us_per_event"] > 0 for turn in turns)


def test_what_is_added_is_the_difference_of_quantiles_and_the_path_has_the_engine():
    turns = {"bare": [Turn(1.0, 5.0, 20.0, 0.0)] * 3, "ingress": [Turn(1.5, 9.0, 30.0, 10.0)] * 3}
    metrics = metrics_of(turns, Leaving(10 * 2**10, 1000, 0), Plan())
    assert (metrics["ingress_added_p50_ms"], metrics["ingress_added_p99_ms"]) == (0.5, 4.0)
    assert metrics["cpu_per_event_vs_uvicorn"] == 1.5
    assert metrics["cpu_of_path_vs_uvicorn"] == 2.0
    assert metrics["kib_per_disconnect"] == pytest.approx(0.01)


@pytest.mark.parametrize("body", [b"", b"data: {}\n\n", b"data: [DONE]\n\n"], ids=str)
def test_a_stream_that_is_cut_or_short_fails_the_run(body, free_port):
    """Known fault: a truncated 200 looks like success to a client that counts nothing."""
    port = free_port()

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + body)
        writer.close()

    async def scenario():
        server = await asyncio.start_server(answer, "127.0.0.1", port)
        async with server:
            await read_streams(port, 1, 3, Latencies(0.0, 1e9))

    with pytest.raises(BenchmarkFailure, match="0 of 3 deltas"):
        asyncio.run(scenario())
