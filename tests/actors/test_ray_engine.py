"""Engine and ranks as Ray actors: equal tokens for every degree, faults, cancellation, ends."""

import asyncio
import os
import signal
import time

import msgspec
import psutil
import pytest
import ray

from flare_ray.actors.directory import EngineDirectory, EngineRecord
from flare_ray.actors.inprocess import start_inprocess
from flare_ray.actors.launch import launch_engine
from flare_ray.actors.placement import preflight
from flare_ray.contracts.messages import Admitted, Failed, Finished
from flare_ray.errors import CapacityError, CheckpointError, ConfigError
from flare_ray.frontend.router import EngineFinder
from tests.actors.conftest import CPUS
from tests.actors.ray_support import Listener, is_alive, rank_addresses, wait_until
from tests.actors.test_core import Consumer
from tests.support.scripted_engine import (
    MAX_CONTEXT,
    make_request,
    scripted_checkpoint,
    scripted_config,
    scripted_deployment,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

APPLICATION = "actors"
NAMES = ("one", "two", "three")
FIXED = {"policy": "fixed"}
FAULT_LIMIT_S = 1.0
RELEASE_LIMIT_S = 10.0
NOTICED_LIMIT_S = 1.5
"""Of a killed engine; its reports are missed after SILENT_S, which is longer."""


@pytest.fixture
def launch(cluster):
    """Starts engines that end with the test."""
    engines = []

    def start(config, application=APPLICATION):
        engine = launch_engine(config, application=application)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def listener(cluster):
    with_stream = Listener(APPLICATION)
    yield with_stream
    with_stream.close()


def submit(engine, listener, name, **fields):
    """Open one call; its reference."""
    listener.expect(name)
    request = make_request(name, reply_to=listener.address, **fields)
    return engine.actor.submit.remote(msgspec.msgpack.encode(request))


def answer(reference, *, timeout_s: float = 20.0):
    raw = ray.get(reference, timeout=timeout_s)
    return msgspec.msgpack.decode(raw, type=Finished | Failed)


def pids_of(engine) -> list[int]:
    return ray.get(engine.actor.rank_pids.remote())


@pytest.fixture(scope="module")
def expected(checkpoint) -> dict[str, list[int]]:
    """Tokens of the same requests in one process."""
    core = start_inprocess(scripted_config(checkpoint, speculation=FIXED))
    consumers = {name: Consumer() for name in NAMES}
    for name, consumer in consumers.items():
        core.submit(make_request(name), consumer)
    for consumer in consumers.values():
        consumer.end()
    core.shutdown(0.0)
    return {name: consumer.tokens for name, consumer in consumers.items()}


@pytest.mark.parametrize(("degree", "queue_depth"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_tokens_equal_the_single_process_for_every_degree(
    launch, listener, checkpoint, expected, degree, queue_depth
):
    config = scripted_deployment(
        checkpoint, tensor_parallel_size=degree, queue_depth=queue_depth, speculation=FIXED
    )
    engine = launch(config)
    references = {name: submit(engine, listener, name) for name in NAMES}
    ends = {name: answer(reference) for name, reference in references.items()}
    for name in NAMES:
        assert ends[name] == listener.end(name)
        assert listener.of(name)[0] == Admitted(name)
        assert listener.tokens(name) == expected[name]


def test_killed_rank_ends_every_call_within_a_second_and_leaves_no_process(
    launch, listener, checkpoint
):
    config = scripted_deployment(checkpoint, tensor_parallel_size=2, context_tokens=MAX_CONTEXT)
    engine = launch(config)
    pids = pids_of(engine)
    names = ("a", "b", "waiting")
    references = [submit(engine, listener, name, max_tokens=60_000) for name in names]
    listener.wait_for_output("a")
    start = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    ends = [answer(reference) for reference in references]
    seconds = time.monotonic() - start
    assert seconds < FAULT_LIMIT_S
    for name, end in zip(names, ends, strict=True):
        assert isinstance(end, Failed) and end.code == "rank_failure"
        assert "rank 1" in end.message and "round" in end.message
        assert listener.end(name) == end
    assert (
        wait_until(
            lambda: not any(is_alive(pid) for pid in pids), timeout_s=RELEASE_LIMIT_S, what="exits"
        )
        < RELEASE_LIMIT_S
    )
    with pytest.raises(ray.exceptions.RayTaskError, match="rank 1"):
        ray.get(engine.actor.check_health.remote())
    refused = answer(submit(engine, listener, "late"))
    assert refused.code == "rank_failure" and refused.status == 503


def test_killed_engine_takes_its_ranks_along(launch, listener, checkpoint):
    engine = launch(scripted_deployment(checkpoint, tensor_parallel_size=2, context_tokens=4096))
    pids = pids_of(engine)
    reference = submit(engine, listener, "a", max_tokens=4000)
    listener.wait_for_output("a")
    ray.kill(engine.actor, no_restart=True)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(reference, timeout=20)
    wait_until(
        lambda: not any(is_alive(pid) for pid in pids), timeout_s=RELEASE_LIMIT_S, what="exits"
    )


def test_ray_47219_killed_engine_is_not_ready_while_its_last_report_is_fresh(launch, checkpoint):
    application = "killed-engine"
    engine = launch(scripted_deployment(checkpoint), application)
    finder = EngineFinder(application, scripted_deployment(checkpoint))
    directory = EngineDirectory(application)
    wait_until(lambda: asyncio.run(finder.ready()), timeout_s=RELEASE_LIMIT_S, what="ready")
    os.kill(ray.get(engine.actor.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)
    took_s = wait_until(
        lambda: asyncio.run(finder.ready()) is None, timeout_s=RELEASE_LIMIT_S, what="not ready"
    )
    assert took_s < NOTICED_LIMIT_S
    assert [report.ready for report in directory.reports()] == [True]


def test_ray_39703_cancelled_call_ends_its_request_alone(launch, listener, checkpoint):
    engine = launch(scripted_deployment(checkpoint, context_tokens=4096))
    reference = submit(engine, listener, "a", max_tokens=4000)
    listener.wait_for_output("a")
    ray.cancel(reference)
    end = listener.end("a")
    assert isinstance(end, Failed) and end.code == "cancelled"
    assert isinstance(answer(submit(engine, listener, "b", max_tokens=5)), Finished)
    stats = ray.get(engine.actor.record_autoscaling_stats.remote())
    assert stats == {"waiting_tokens": 0.0, "page_usage": 0.0, "running_requests": 0.0}
    assert ray.get(engine.actor.record_routing_stats.remote()) == {"ready": True, "open": 0}


def test_refusals_are_answers_with_their_status(launch, listener, checkpoint):
    engine = launch(scripted_deployment(checkpoint, context_tokens=4096))
    first = submit(engine, listener, "same", max_tokens=2000)
    listener.wait_for_output("same")
    request = make_request("same", reply_to=listener.address)
    duplicate = answer(engine.actor.submit.remote(msgspec.msgpack.encode(request)))
    assert (duplicate.code, duplicate.status) == ("duplicate_request_id", 409)
    ray.cancel(first)


def test_engine_is_listed_with_its_metrics_until_it_ends(launch, checkpoint):
    # A namespace of its own: a killed engine's report stays in the others' until it is stale.
    directory = EngineDirectory("listing")
    engine = launch(scripted_deployment(checkpoint), application="listing")
    record = msgspec.msgpack.decode(engine.info, type=EngineRecord)
    wait_until(lambda: directory.engines(), timeout_s=5.0, what="a report")
    assert directory.engines() == [record] == [directory.engine(record.engine_id)]
    (report,) = directory.reports()
    assert report.ready and report.metrics.identity == record.engine_id
    assert record.engine_id in ray.get(engine.actor.metrics_text.remote())
    engine.close()
    assert directory.reports() == [] and directory.engine(record.engine_id) is None


def test_wrong_checkpoint_fails_the_start_by_name_and_leaves_no_rank(launch, tmp_path):
    checkpoint = scripted_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises((CheckpointError, ConfigError), match="script"):
        launch(scripted_deployment(checkpoint, tensor_parallel_size=2))
    wait_until(
        lambda: ray.available_resources().get("CPU") == CPUS, timeout_s=10.0, what="free CPUs"
    )


def test_absent_gpus_fail_the_start_by_name_within_the_placement_timeout(launch, checkpoint):
    config = scripted_deployment(checkpoint, tensor_parallel_size=4)
    engine = config.engine.model_copy(update={"device": "cuda"})
    start = time.monotonic()
    with pytest.raises(CapacityError, match=r"4 GPU.*placement_timeout_s.*demo"):
        launch(config.model_copy(update={"engine": engine}))
    assert time.monotonic() - start < 10.0


def test_attempts_of_one_deployment_share_one_wait_for_nodes(cluster, checkpoint):
    """Ray repeats a build that raised, so that waits would add up beyond any promise."""
    config = scripted_deployment(checkpoint, tensor_parallel_size=8)
    limit_s = config.engine_deployment.placement_timeout_s
    took_s = []
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(CapacityError, match=r"4\.5 CPU"):
            preflight(config)
        took_s.append(time.monotonic() - start)
    assert took_s[0] >= limit_s
    assert took_s[1] < limit_s / 2
    other = config.model_copy(update={"model_name": "other"})
    start = time.monotonic()
    with pytest.raises(CapacityError):
        preflight(other)
    assert time.monotonic() - start >= limit_s


def test_absent_weights_fail_the_start_at_once(launch, tmp_path):
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"engine\.checkpoint.*is no folder.*demo"):
        launch(scripted_deployment(str(tmp_path / "nowhere")))
    assert time.monotonic() - start < 2.0


def test_no_socket_is_left(launch, checkpoint):
    engine = launch(scripted_deployment(checkpoint))
    pid = ray.get(engine.actor.__ray_call__.remote(lambda self: os.getpid()))
    own = {found.laddr for found in psutil.Process(pid).net_connections("unix")}
    own &= rank_addresses()
    assert len(own) == 1
    engine.close()
    wait_until(
        lambda: not own & rank_addresses(), timeout_s=RELEASE_LIMIT_S, what="sockets are gone"
    )
