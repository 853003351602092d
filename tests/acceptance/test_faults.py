"""One service of two ranks under `flare-ray serve`: readiness, a killed rank, a graceful stop
(contract: A4; known faults probe 6).

The service starts behind a gate that holds back the first generation on one rank only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest

from tests.acceptance.conftest import Greedy
from tests.support.gated_glm import DOTTED, GATE, reached
from tests.support.served_glm import MODEL, deployment_args
from tests.support.service import (
    ENGINE,
    INGRESS,
    RANK,
    START_LIMIT_S,
    STOP_LIMIT_S,
    Holdings,
    Service,
    machine_load,
    port_is_free,
    wait_for,
    write_deployment,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

LIVE_LIMIT_S = 1.0
ERROR_LIMIT_S = 1.0
RECOVERY_LIMIT_S = 60.0
FREE_LIMIT_S = 20.0
CLIENT_LIMIT_S = 120.0
STOP_SLACK_S = 10.0
CONTEXT = 4096
ENDLESS = 3900
LONG = 300
KNOCK_S = 0.05
SOCKET_SLACK = 2
"""Sockets a process of Ray's own may have more or less of from one moment to the next."""
WAITING = {"one": "the mill and ", "two": "a small door "}


@dataclass
class Start:
    """What was seen before the gate was opened.

    Attributes:
        statuses: of /health, /v1/models, and of a completion.
        live_s: slowest answer of /health/live.
    """

    statuses: list[int] = field(default_factory=list)
    error: dict = field(default_factory=dict)
    live_s: float = 0.0


class Gate:
    """A service that is started behind the gate, and started again where a test has stopped it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.gate = file.with_suffix(".gate")
        self.service = Service(file, env={GATE: str(self.gate)})
        self.seen = Start()

    def look(self) -> None:
        """Fill `seen`, then open the gate."""
        service, seen = self.service, self.seen
        wait_for(lambda: service.status("/health/live") == 200, START_LIMIT_S, "HTTP is up")
        wait_for(reached(self.gate).exists, START_LIMIT_S, "the first generation is under way")
        for _ in range(5):
            started = time.monotonic()
            assert service.status("/health/live") == httpx.codes.OK
            seen.live_s = max(seen.live_s, time.monotonic() - started)
            health = service.get("/health")
            assert health is not None
            seen.statuses += [health.status_code, service.status("/v1/models")]
            seen.error = health.json()["error"]
        refused = httpx.post(f"{service.url}/v1/completions", json=body("a", 1), timeout=30.0)
        seen.statuses.append(refused.status_code)
        self.gate.touch()
        service.wait_ready()

    def restarted(self) -> Service:
        """Another service of the same file, on the same port."""
        self.service = Service(self.file, env={GATE: str(self.gate)})
        return self.service


@pytest.fixture(scope="module")
def gated(
    checkpoint: Path, greedy: Greedy, tmp_path_factory: pytest.TempPathFactory, free_port
) -> Iterator[Gate]:
    greedy("so ", LONG)
    for prompt in WAITING.values():
        greedy(prompt, 30)
    file = tmp_path_factory.mktemp("ranks") / "ranks.yaml"
    args = deployment_args(
        checkpoint,
        recipe=DOTTED,
        tensor_parallel_size=2,
        concurrency=2,
        context_tokens=CONTEXT,
        queue_depth=2,
    )
    gated = Gate(write_deployment(file, args, free_port()))
    try:
        gated.look()
        yield gated
    finally:
        gated.service.kill()


@pytest.fixture
def service(gated: Gate) -> Service:
    """Running and ready, whatever the test before has done."""
    if gated.service.process.poll() is not None:
        gated.restarted().wait_ready()
    return gated.service


def body(prompt: str, max_tokens: int, **fields: object) -> dict:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def test_health_is_503_until_a_generation_went_through_all_ranks_and_live_answers_at_once(gated):
    seen = gated.seen
    assert set(seen.statuses) == {503}, seen.statuses
    assert seen.error["message"] and set(seen.error) == {"message", "type", "param", "code"}
    assert seen.live_s < LIVE_LIMIT_S, f"{seen.live_s:.2f} s, {machine_load()}"


def test_greedy_text_of_two_ranks_is_that_of_one(service, greedy):
    answer = httpx.post(f"{service.url}/v1/completions", json=body("so ", LONG), timeout=60.0)
    assert answer.json()["choices"][0]["text"] == greedy("so ", LONG)


class HealthLog:
    """/health as a load balancer sees it: every change of its status, on a thread."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._done = threading.Event()
        self.changes: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(0.05):
            status = self._service.status("/health")
            if not self.changes or self.changes[-1][1] != status:
                self.changes.append((time.monotonic(), status))

    def stop(self) -> list[int]:
        self._done.set()
        self._thread.join()
        return [status for _, status in self.changes]


@dataclass
class Killed:
    """How the clients of a killed rank fared.

    Attributes:
        streamed / whole: message and seconds after the kill, of the streaming client and of the one
            that waits for the whole answer.
        texts: answers of the requests that waited for a slot, by name.
    """

    at_s: float = 0.0
    streamed: tuple[str, float] = ("", 0.0)
    whole: tuple[str, float] = ("", 0.0)
    texts: dict[str, str] = field(default_factory=dict)


async def kill_mid_stream(service: Service, pid: int) -> Killed:
    """Two requests hold both slots and run, two wait; then the rank is killed."""
    killed, running = Killed(), asyncio.Event()

    async def streaming(client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(**sdk(body("so ", ENDLESS)), stream=True)
        with pytest.raises(openai.APIError) as failure:
            async for _ in stream:
                running.set()
        killed.streamed = (failure.value.message, time.monotonic())

    async def whole(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.InternalServerError) as failure:
            await client.completions.create(**sdk(body("no ", ENDLESS)))
        assert failure.value.status_code == 503
        killed.whole = (failure.value.message, time.monotonic())

    async def waiting(client: openai.AsyncOpenAI, name: str) -> None:
        words = sdk(body(WAITING[name], 30))
        if name == "one":
            stream = await client.completions.create(**words, stream=True)
            killed.texts[name] = "".join([chunk.choices[0].text async for chunk in stream])
        else:
            answer = await client.completions.create(**words)
            killed.texts[name] = answer.choices[0].text

    async with openai.AsyncOpenAI(
        base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=CLIENT_LIMIT_S
    ) as client:
        tasks = [asyncio.create_task(streaming(client)), asyncio.create_task(whole(client))]
        await asyncio.wait_for(running.wait(), CLIENT_LIMIT_S)
        await until(service, running=2, waiting=0)
        tasks += [asyncio.create_task(waiting(client, name)) for name in WAITING]
        await until(service, running=2, waiting=2)
        killed.at_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
    return killed


def sdk(body: dict) -> dict:
    """The body as arguments of the openai package, which does not know every field."""
    return {
        **{k: v for k, v in body.items() if k != "ignore_eos"},
        "extra_body": {"ignore_eos": True},
    }


async def until(service: Service, *, running: int, waiting: int) -> None:
    def reached() -> bool:
        return (
            service.gauge("flare_num_requests_running") == running
            and service.gauge("flare_num_requests_waiting") == waiting
        )

    await asyncio.to_thread(wait_for, reached, FREE_LIMIT_S, f"{running} run, {waiting} wait")


def test_roles_of_processes_are_known_while_they_work(service):
    """The measure of the tests below: Ray renames a process for the time of each call."""
    service.wait_idle(FREE_LIMIT_S)
    idle = {role: service.pids(role) for role in (ENGINE, INGRESS, RANK)}
    assert [len(idle[role]) for role in (ENGINE, INGRESS, RANK)] == [1, 1, 2]
    with httpx.stream(
        "POST",
        f"{service.url}/v1/completions",
        json=body("so ", ENDLESS, stream=True),
        timeout=CLIENT_LIMIT_S,
    ) as answer:
        next(answer.iter_lines())
        assert {role: service.pids(role) for role in idle} == idle


# Slow: its one-second limit is meant for a machine that does nothing else.
@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_killed_rank_is_named_to_every_client_and_the_service_recovers_without_a_leak(
    service, greedy, victim
):
    service.wait_idle(FREE_LIMIT_S)
    before = service.holdings()
    old = {*service.pids(RANK), *service.pids(ENGINE)}
    pid = service.pids(RANK)[victim]
    health = HealthLog(service)
    try:
        killed = asyncio.run(kill_mid_stream(service, pid))
        service.wait_ready(RECOVERY_LIMIT_S)
        recovered_s = time.monotonic() - killed.at_s
        service.wait_idle(FREE_LIMIT_S)
    finally:
        statuses = health.stop()
    for message, told_s in (killed.streamed, killed.whole):
        assert f"(pid {pid})" in message and "rank " in message, message
        took_s = told_s - killed.at_s
        assert took_s < ERROR_LIMIT_S, f"told after {took_s:.2f} s, {machine_load()}"
    assert recovered_s < RECOVERY_LIMIT_S, f"{recovered_s:.1f} s, {machine_load()}"
    # Those that waited had shown nothing: each was run once more, and says what it always says.
    for name, prompt in WAITING.items():
        assert killed.texts[name] == greedy(prompt, 30)
    assert statuses == [200, 503, 200]
    assert not old & {process.pid for process in service.processes()}
    assert_no_more_than(before, service.holdings(), service)


@pytest.mark.slow
def test_killed_engine_ends_its_clients_and_its_ranks_and_the_service_recovers(service, greedy):
    """Nobody is left to name a cause; waiting requests are answered by the next engine all the
    same."""
    service.wait_idle(FREE_LIMIT_S)
    before = service.holdings()
    old = {*service.pids(RANK), *service.pids(ENGINE)}
    killed = asyncio.run(kill_mid_stream(service, service.pids(ENGINE)[0]))
    service.wait_ready(RECOVERY_LIMIT_S)
    assert time.monotonic() - killed.at_s < RECOVERY_LIMIT_S, machine_load()
    for message, _ in (killed.streamed, killed.whole):
        assert "engine" in message and "gone" in message, message
    for name, prompt in WAITING.items():
        assert killed.texts[name] == greedy(prompt, 30)
    service.wait_idle(FREE_LIMIT_S)
    assert not old & {process.pid for process in service.processes()}
    assert_no_more_than(before, service.holdings(), service)


@pytest.mark.slow
def test_killed_http_replica_frees_its_requests_and_is_replaced(service, greedy):
    async def scenario() -> None:
        async with httpx.AsyncClient(timeout=CLIENT_LIMIT_S) as client:
            calls = [
                asyncio.create_task(
                    client.post(f"{service.url}/v1/completions", json=body("so ", ENDLESS))
                )
                for _ in range(2)
            ]
            await until(service, running=2, waiting=0)
            os.kill(service.pids(INGRESS)[0], signal.SIGKILL)
            for call in calls:
                try:
                    assert (await call).status_code >= 500
                except httpx.TransportError:
                    continue  # the connection broke, which a client can tell from an answer

    service.wait_idle(FREE_LIMIT_S)
    engine = service.pids(ENGINE)
    asyncio.run(scenario())
    service.wait_ready(RECOVERY_LIMIT_S)
    service.wait_idle(RECOVERY_LIMIT_S)
    assert service.pids(ENGINE) == engine
    answer = httpx.post(f"{service.url}/v1/completions", json=body("so ", LONG), timeout=60.0)
    assert answer.json()["choices"][0]["text"] == greedy("so ", LONG)


def assert_no_more_than(before: Holdings, after: Holdings, service: Service) -> None:
    """The rebuilt service holds what the first one held."""
    for role in (ENGINE, INGRESS, RANK):
        assert after.roles[role] == before.roles[role], role
    assert len(after.shared) <= len(before.shared), after.shared - before.shared
    gone = before.paths - after.paths
    assert not [path for path in gone if Path(path).exists()], gone
    assert len(after.paths) <= len(before.paths), after.paths - before.paths
    for pid in before.sockets.keys() & after.sockets.keys():
        grown = after.sockets[pid] - before.sockets[pid]
        assert grown <= SOCKET_SLACK, f"process {pid} has {grown} sockets more: {service.tail()}"


def test_stop_lets_running_requests_finish_and_the_port_serves_again(service, gated, greedy):
    service.wait_idle(FREE_LIMIT_S)
    held = service.holdings()
    status, texts, refusals = asyncio.run(stop_mid_stream(service))
    assert texts == [greedy("so ", LONG)] * 2
    assert refusals
    for refusal in refusals:
        assert refusal.status_code == 503, f"{refusal.status_code}: {refusal.text[:200]}"
        assert int(refusal.headers["retry-after"]) > 0
        error = refusal.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "shutting down" in error["message"]
    assert status == 0, service.tail()
    assert not service.processes()
    assert port_is_free(service.port)
    assert not [path for path in (*held.shared, *held.paths) if Path(path).exists()]
    again = gated.restarted()
    again.wait_ready()
    answer = httpx.post(f"{again.url}/v1/completions", json=body("so ", LONG), timeout=60.0)
    assert answer.json()["choices"][0]["text"] == greedy("so ", LONG)


async def stop_mid_stream(service: Service) -> tuple[int, list[str], list[httpx.Response]]:
    """SIGTERM while a stream and a whole answer are running: exit status, both texts, and what new
    requests are told from when the door has closed until nothing listens."""
    running = asyncio.Event()

    async def streaming(client: openai.AsyncOpenAI) -> str:
        stream = await client.completions.create(**sdk(body("so ", LONG)), stream=True)
        pieces = []
        async for chunk in stream:
            running.set()
            pieces.append(chunk.choices[0].text)
        assert chunk.choices[0].finish_reason == "length"
        return "".join(pieces)

    async def whole(client: openai.AsyncOpenAI) -> str:
        answer = await client.completions.create(**sdk(body("so ", LONG)))
        return answer.choices[0].text

    async def knocking() -> list[httpx.Response]:
        refusals = []
        async with httpx.AsyncClient(base_url=service.url, timeout=CLIENT_LIMIT_S) as client:
            with contextlib.suppress(httpx.TransportError):
                while (await client.get("/v1/models")).status_code == httpx.codes.OK:
                    await asyncio.sleep(KNOCK_S)
                while True:
                    refusals.append(await client.post("/v1/completions", json=body("a", 1)))
                    refusals.append(await client.get("/health"))
                    await asyncio.sleep(KNOCK_S)
        return refusals

    async with openai.AsyncOpenAI(
        base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=CLIENT_LIMIT_S
    ) as client:
        tasks = [asyncio.create_task(whole(client)), asyncio.create_task(streaming(client))]
        await asyncio.wait_for(running.wait(), CLIENT_LIMIT_S)
        service.process.send_signal(signal.SIGTERM)
        knocks = asyncio.create_task(knocking())
        status = await asyncio.to_thread(service.wait, STOP_LIMIT_S)
        return status, await asyncio.gather(*tasks), await knocks


@pytest.mark.slow
def test_stop_ends_requests_that_outlast_the_bound_and_leaves_no_process(
    checkpoint, tmp_path, free_port
):
    bound_s = 3.0
    args = deployment_args(checkpoint, context_tokens=CONTEXT)
    args["engine_deployment"]["graceful_shutdown_s"] = bound_s
    service = Service(write_deployment(tmp_path / "bound.yaml", args, free_port()))
    try:
        service.wait_ready()
        with httpx.stream(
            "POST",
            f"{service.url}/v1/completions",
            json=body("so ", ENDLESS, stream=True),
            timeout=CLIENT_LIMIT_S,
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            asked_s = time.monotonic()
            service.process.send_signal(signal.SIGTERM)
            said = [line.removeprefix("data: ") for line in lines if line]
        assert said[-1] == "[DONE]"
        assert "shutting down" in json.loads(said[-2])["error"]["message"]
        ended_s = time.monotonic() - asked_s
        status = service.wait(STOP_LIMIT_S)
        assert status == 0, service.tail()
        assert bound_s - 1.0 < ended_s < bound_s + STOP_SLACK_S, f"{ended_s:.1f} s"
        assert not service.processes()
    finally:
        service.kill()
