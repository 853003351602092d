"""Engines 1 -> 2 -> 1 and HTTP replicas 1 -> 3 -> 1 under load: no stream fails or is cut short."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from string import ascii_lowercase

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.processes import deployment_file, running
from tests.support.served_checkpoint import alphabet_from, served_checkpoint, served_deployment

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

START_LIMIT_S = 90.0
SCALE_LIMIT_S = 150.0
ANSWER_LIMIT_S = 90.0
TOKENS = 150
BUSY_CLIENTS = 12
CALM_CLIENTS = 1
INGRESS_TITLE = ":Ingress"


@pytest.fixture
def service(
    tmp_path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, int]]:
    """Address and process id of a server whose replicas come and go within seconds."""
    for role in ("REPLICA", "HANDLE"):
        monkeypatch.setenv(f"RAY_SERVE_{role}_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
    config = served_deployment(served_checkpoint(tmp_path), admission={"max_waiting": 64})
    fields = config.model_dump(mode="json", exclude_unset=True)
    fields["engine_deployment"] |= {
        "cpus_per_rank": 0.1,
        "graceful_shutdown_s": 60.0,
        "autoscaling": {
            "max_replicas": 2,
            "waiting_tokens": 2 * TOKENS,
            "upscale_delay_s": 1.0,
            "downscale_delay_s": 5.0,
            "look_back_s": 3.0,
        },
    }
    fields["ingress"] |= {
        "min_replicas": 1,
        "max_replicas": 3,
        "cpus": 0.1,
        "target_ongoing_requests": 4,
        "upscale_delay_s": 1.0,
        "downscale_delay_s": 5.0,
    }
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    file = deployment_file(tmp_path, type(config).model_validate(fields), port)
    with running(
        "serve", str(file), log=tmp_path / "log", url=url, start_limit_s=START_LIMIT_S
    ) as process:
        yield url, process.pid


class Load:
    """Clients that stream one answer after the other and look at every byte."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/v1/completions"
        self.wanted = 0
        self.whole = 0
        self.faults: list[str] = []
        self._clients: list[asyncio.Task[None]] = []
        self._random = random.Random(7)

    def set(self, clients: int) -> None:
        """Have this many clients; those too many end with their answer."""
        self.wanted = clients
        self._clients = [task for task in self._clients if not task.done()]
        for number in range(len(self._clients), clients):
            self._clients.append(asyncio.create_task(self._run(number)))

    async def finish(self) -> None:
        self.set(0)
        await asyncio.gather(*self._clients)

    async def _run(self, number: int) -> None:
        async with httpx.AsyncClient(timeout=ANSWER_LIMIT_S) as client:
            while number < self.wanted:
                letter = self._random.choice(ascii_lowercase)
                try:
                    fault = await self._stream(client, letter)
                except httpx.HTTPError as error:
                    fault = repr(error)
                self.whole += not fault
                if fault:
                    self.faults.append(fault)

    async def _stream(self, client: httpx.AsyncClient, letter: str) -> str:
        """What was wrong with one answer, "" if nothing."""
        body = {"model": "letters", "prompt": letter, "max_tokens": TOKENS, "temperature": 0}
        text, last = "", ""
        headers = {"x-session-id": letter}
        async with client.stream(
            "POST", self.url, json=body | {"stream": True}, headers=headers
        ) as answer:
            if answer.status_code != 200:
                return f"{answer.status_code}: {(await answer.aread()).decode()}"
            async for line in answer.aiter_lines():
                last = line or last
                if line.startswith("data: {"):
                    choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
                    text += choices[0].get("text", "")
        whole = text == alphabet_from(letter, TOKENS) and last == "data: [DONE]"
        return "" if whole else f"cut short after {len(text)} characters: {last}"


async def engines(url: str) -> int:
    """Engines that report."""
    async with httpx.AsyncClient(timeout=30.0) as client:
        text = (await client.get(f"{url}/metrics")).text
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return sum(sample.name == "flare_engine_start_time_seconds" for sample in samples)


def ingresses(pid: int) -> int:
    """HTTP replicas that are processes, starting and ending ones included."""
    titles = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            titles.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue  # it has just ended
    return sum(INGRESS_TITLE in title for title in titles)


async def scaled(url: str, pid: int, *, engine_count: int, ingress_count: int) -> str:
    """Wait for both numbers; the seconds that each took, in words."""
    started, took = time.monotonic(), {}
    while len(took) < 2:
        await asyncio.sleep(0.5)
        now_s = time.monotonic() - started
        if await engines(url) == engine_count:
            took.setdefault("engines", now_s)
        if await asyncio.to_thread(ingresses, pid) == ingress_count:
            took.setdefault("HTTP replicas", now_s)
        assert now_s < SCALE_LIMIT_S, took
    return ", ".join(f"{what} {seconds:.1f} s" for what, seconds in sorted(took.items()))


def test_engines_and_http_replicas_come_and_go_without_a_fault(service):
    url, pid = service

    async def run() -> Load:
        load = Load(url)
        assert (await engines(url), ingresses(pid)) == (1, 1)
        load.set(BUSY_CLIENTS)
        print("up:", await scaled(url, pid, engine_count=2, ingress_count=3))
        await asyncio.sleep(5.0)  # all of them take part
        load.set(CALM_CLIENTS)
        print("down:", await scaled(url, pid, engine_count=1, ingress_count=1))
        await load.finish()
        return load

    load = asyncio.run(run())
    print(f"{load.whole} whole answers, {len(load.faults)} faults")
    assert not load.faults, load.faults[:5]
    assert load.whole > BUSY_CLIENTS
