"""Engines as Serve replicas: health, replacement after a fault, drain, two at once."""

import os
import signal
import time

import msgspec
import pytest
from ray import serve

from flare_ray.actors.directory import EngineDirectory
from flare_ray.actors.engine import Engine, engine_options
from flare_ray.contracts.messages import Failed, Finished
from tests.actors.ray_support import Listener, is_alive, wait_until
from tests.support.scripted_engine import make_request, scripted_deployment

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

APPLICATION = "flare"
RECOVERY_LIMIT_S = 60.0
RELEASE_LIMIT_S = 10.0


@pytest.fixture(scope="module")
def serving(cluster):
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()


@pytest.fixture
def listener(serving):
    with_stream = Listener(APPLICATION)
    yield with_stream
    with_stream.close()


class Client:
    """One deployed application and its listener."""

    def __init__(self, handle, listener: Listener) -> None:
        self.handle = handle
        self.listener = listener

    def submit(self, name: str, **fields):
        self.listener.expect(name)
        request = make_request(name, reply_to=self.listener.address, **fields)
        return self.handle.submit.remote(msgspec.msgpack.encode(request))

    def ask(self, name: str, **fields):
        return decode(self.submit(name, **fields).result(timeout_s=20))


def decode(raw: bytes):
    return msgspec.msgpack.decode(raw, type=Finished | Failed)


@pytest.fixture
def deploy(serving, listener):
    def run(config) -> Client:
        deployment = serve.deployment(Engine).options(**engine_options(config))
        handle = serve.run(deployment.bind(config), name=APPLICATION, route_prefix=None)
        return Client(handle, listener)

    yield run
    serve.delete(APPLICATION)


def rank_pids(client: Client) -> list[int]:
    return client.handle.rank_pids.remote().result(timeout_s=20)


def test_rank_killed_mid_generation_fails_its_calls_and_the_replica_comes_back(deploy, checkpoint):
    client = deploy(scripted_deployment(checkpoint, tensor_parallel_size=2, context_tokens=4096))
    directory = EngineDirectory(APPLICATION)
    wait_until(directory.engines, timeout_s=5.0, what="a report")
    old = directory.engines()[0].engine_id
    pids = rank_pids(client)
    calls = [client.submit(name, max_tokens=4000) for name in ("a", "b", "waiting")]
    client.listener.wait_for_output("a")
    start = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    ends = [decode(call.result(timeout_s=20)) for call in calls]
    failed_s = time.monotonic() - start
    assert {end.code for end in ends} == {"rank_failure"}
    assert all("rank 0" in end.message for end in ends)
    gone_s = wait_until(
        lambda: not any(is_alive(pid) for pid in pids), timeout_s=RELEASE_LIMIT_S, what="exits"
    )
    wait_until(
        lambda: any(record.engine_id != old for record in directory.engines()),
        timeout_s=RECOVERY_LIMIT_S,
        what="a new engine",
    )
    deadline = start + RECOVERY_LIMIT_S
    for attempt in range(1000):
        end = client.ask(f"again{attempt}", max_tokens=5)
        if isinstance(end, Finished) or time.monotonic() > deadline:
            break
        assert end.status == 503
        time.sleep(0.1)
    assert isinstance(end, Finished), end
    print(
        f"failed after {failed_s:.3f} s, ranks gone {gone_s:.3f} s later, answers again "
        f"{time.monotonic() - start:.1f} s after the kill"
    )
    assert failed_s < 1.0


def test_two_engines_serve_one_listener_and_both_are_listed(deploy, checkpoint):
    config = scripted_deployment(checkpoint)
    two = config.engine_deployment.model_copy(update={"replicas": 2})
    client = deploy(config.model_copy(update={"engine_deployment": two}))
    names = [f"chat{number}" for number in range(16)]
    calls = {name: client.submit(name, max_tokens=20) for name in names}
    for name, call in calls.items():
        end = decode(call.result(timeout_s=30))
        assert end == client.listener.end(name)
        assert len(client.listener.tokens(name)) == 20
    reports = EngineDirectory(APPLICATION).reports()
    assert len({report.engine_id for report in reports}) == 2


def test_deleting_the_application_drains_its_calls_first(deploy, checkpoint):
    client = deploy(scripted_deployment(checkpoint, context_tokens=4096))
    pids = rank_pids(client)
    call = client.submit("long", max_tokens=4000)
    client.listener.wait_for_output("long")
    assert len(client.listener.tokens("long")) < 1000  # most of it is still to come
    serve.delete(APPLICATION)
    assert isinstance(decode(call.result(timeout_s=20)), Finished)
    wait_until(
        lambda: not any(is_alive(pid) for pid in pids), timeout_s=RELEASE_LIMIT_S, what="exits"
    )
    assert EngineDirectory(APPLICATION).reports() == []


def test_cancelled_handle_call_ends_its_request(deploy, checkpoint):
    client = deploy(scripted_deployment(checkpoint, context_tokens=4096))
    call = client.submit("gone", max_tokens=4000)
    client.listener.wait_for_output("gone")
    call.cancel()
    end = client.listener.end("gone")
    assert isinstance(end, Failed) and end.code == "cancelled"
    assert isinstance(client.ask("next", max_tokens=5), Finished)
