"""The whole application on Ray Serve over engines of the scripted recipe (contract: A2-A5)."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray._private import state
from ray.serve.context import _get_global_client

from flare_ray.actors.directory import EngineDirectory
from flare_ray.config import RoutingConfig
from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.errors import CapacityError, ConfigError, FlareError
from flare_ray.frontend.app import LocalServe, build
from tests.support.served_checkpoint import alphabet_from, served_checkpoint, served_deployment

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

START_LIMIT_S = 60.0
ERROR_LIMIT_S = 3.0
"""A client hears of a dead rank within 1 s on an idle machine; the rest is room for a busy one."""
RECOVERY_LIMIT_S = 60.0
FREE_LIMIT_S = 15.0
REFUSAL_LIMIT_S = 30.0
HEARD_LIMIT_S = 3.0
"""Until every HTTP replica's router knows of all engines."""
HOME_TOKENS = RoutingConfig().home_pages * PAGE_TOKENS
REPORT_S = 1.5
"""Engines write their metrics each second."""


@pytest.fixture(scope="module")
def port(free_port: Callable[[], int]) -> int:
    return free_port()


@pytest.fixture(scope="module", autouse=True)
def cluster(port: int):
    ray.init(
        "local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
        configure_logging=False,
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return served_checkpoint(tmp_path_factory.mktemp("letters"))


class App:
    """One running application."""

    def __init__(self, port: int, name: str) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}/{name}"
        wait_until(lambda: self.get("/health").status_code == 200, START_LIMIT_S)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10.0)

    def post(self, **body) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=completion(**body), timeout=70.0)

    def gauge(self, name: str) -> float:
        """Sum of a series over all engines, from /metrics."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        samples = [s for family in families for s in family.samples if s.name == name]
        return sum(sample.value for sample in samples)

    def routed(self) -> dict[str, float]:
        """Requests that routers have sent to each engine."""
        counts: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if sample.name == "flare_router_requests_total":
                    name = sample.labels["engine"]
                    counts[name] = counts.get(name, 0) + sample.value
        return counts

    def idle(self) -> bool:
        """Nothing runs, nothing waits, every page is free."""
        busy = self.gauge("flare_num_requests_running") + self.gauge("flare_num_requests_waiting")
        pages = self.gauge("flare_pages")
        return not busy and pages > 0 and self.gauge("flare_pages_free") == pages

    @property
    def engine(self):
        return serve.get_deployment_handle("Engine", self.name)


def completion(**fields):
    return {"model": "letters", "prompt": "a", "temperature": 0, **fields}


def wait_until(done: Callable[[], object], limit_s: float) -> float:
    started = time.monotonic()
    while not done():
        assert time.monotonic() - started < limit_s, "did not come about in time"
        time.sleep(0.1)
    return time.monotonic() - started


def texts(lines) -> tuple[str, list[dict]]:
    """Text and chunks of a stream's lines."""
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in lines
        if line.startswith("data: ") and line != "data: [DONE]"
    ]
    text = "".join(c["choices"][0]["text"] for c in chunks if c.get("choices"))
    return text, chunks


@pytest.fixture(scope="module")
def pair(port: int, checkpoint: str):
    """Two engines behind two HTTP replicas."""
    config = served_deployment(checkpoint, engines=2, ingresses=2, admission={"max_waiting": 16})
    serve.run(build(config), name="pair", route_prefix="/pair")
    yield App(port, "pair")
    serve.delete("pair")


@pytest.fixture
def single(port: int, checkpoint: str):
    """One engine of two ranks behind one HTTP replica, made anew for each test."""
    config = served_deployment(
        checkpoint, tensor_parallel_size=2, admission={"max_waiting": 2, "retry_after_s": 3.0}
    )
    serve.run(build(config), name="single", route_prefix="/single")
    yield App(port, "single")
    serve.delete("single")


def test_every_client_gets_its_own_tokens(pair):
    async def one(client: httpx.AsyncClient, number: int) -> tuple[str, str]:
        letter, count = "abcdefghijklmnop"[number], 40 + number
        body = completion(prompt=letter, max_tokens=count, stream=bool(number % 2))
        answer = await client.post(f"{pair.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if number % 2:
            got, chunks = texts(answer.text.splitlines())
            assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "length"
        else:
            got = answer.json()["choices"][0]["text"]
        return got, alphabet_from(letter, count)

    async def all_at_once() -> list[tuple[str, str]]:
        async with httpx.AsyncClient(timeout=60.0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(16)))

    for got, expected in asyncio.run(all_at_once()):
        assert got == expected


def test_chat_over_http(pair):
    body = {
        "model": "letters",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 5,
        "temperature": 0,
    }
    answer = httpx.post(f"{pair.url}/v1/chat/completions", json=body, timeout=30.0)
    assert answer.json()["choices"][0]["message"]["content"] == "abcde"


def test_metrics_know_both_engines_whichever_replica_answers(pair):
    seen = set()
    for _ in range(12):
        families = text_string_to_metric_families(pair.get("/metrics").text)
        engines = {
            sample.labels["engine"]
            for family in families
            for sample in family.samples
            if sample.name == "flare_num_requests_running"
        }
        seen.add(frozenset(engines))
    assert len(seen) == 1
    assert len(seen.pop()) == 2


def test_turns_of_a_conversation_meet_the_engine_that_has_their_prefix(pair):
    """Whichever HTTP replica takes a turn; by chance a pass of eight later turns would hold once in
    256 times. A replica that has just started hears of the second engine after seconds."""

    def cached(begin: str) -> list[int]:
        found = []
        for first in "abcd":
            prompt = begin + first * HOME_TOKENS
            for _ in range(3):
                usage = pair.post(prompt=prompt, max_tokens=2).json()["usage"]
                found.append(usage["prompt_tokens_details"]["cached_tokens"])
                prompt += "x" * 70
        return found

    time.sleep(REPORT_S)  # for what earlier requests count
    before, passes = pair.gauge("flare_router_requests_total"), []
    for begin in "pqr":
        passes.append(cached(begin))
        later = [tokens for number, tokens in enumerate(passes[-1]) if number % 3]
        if min(later) >= HOME_TOKENS:
            break
        time.sleep(HEARD_LIMIT_S)
    assert min(later) >= HOME_TOKENS, passes
    time.sleep(REPORT_S)
    assert pair.gauge("flare_router_requests_total") - before == sum(map(len, passes))


def test_salts_share_no_prefix_on_an_engine(pair):
    def cached(salt: str) -> int:
        body = {"prompt": "salted" * 60, "max_tokens": 2, "cache_salt": salt}
        answer = httpx.post(
            f"{pair.url}/v1/completions",
            json=completion(**body),
            headers={"x-session-id": "one engine"},
            timeout=30.0,
        )
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(salt) > 0 for salt in ("one", "two", "one")] == [False, False, True]


@pytest.mark.slow
def test_sessions_of_a_killed_engine_move_to_another_and_stay_there(pair):
    def ask(count: int) -> set[str]:
        """Engines that took `count` requests of one session, by their counters."""
        time.sleep(REPORT_S)
        before = pair.routed()
        for _ in range(count):
            answer = httpx.post(
                f"{pair.url}/v1/completions",
                json=completion(max_tokens=3),
                headers={"x-session-id": "s"},
                timeout=70.0,
            )
            assert answer.status_code == 200, answer.text
        time.sleep(REPORT_S)
        return {name for name, number in pair.routed().items() if number > before.get(name, 0)}

    [home] = ask(4)
    record = EngineDirectory("pair").engine(home)
    started = time.monotonic()
    os.kill(state.actors(actor_id=record.actor_id)["Pid"], signal.SIGKILL)
    [other] = ask(4)
    print(f"moved, and answered four times, within {time.monotonic() - started:.1f} s")
    assert other != home

    def living() -> set[str]:
        return {record.engine_id for record in EngineDirectory("pair").engines()} - {home}

    wait_until(lambda: len(living()) == 2, RECOVERY_LIMIT_S)


@pytest.mark.parametrize("stream", [True, False])
def test_h18_client_that_hangs_up_frees_everything(pair, stream):
    body = completion(max_tokens=8000, ignore_eos=True, stream=stream)
    url = f"{pair.url}/v1/completions"
    if stream:
        with httpx.stream("POST", url, json=body, timeout=20.0) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=httpx.Timeout(20.0, read=0.4))
    time.sleep(REPORT_S)
    wait_until(pair.idle, FREE_LIMIT_S)
    generated = pair.gauge("flare_generation_tokens_total")
    assert generated > 0
    time.sleep(REPORT_S)
    assert pair.gauge("flare_generation_tokens_total") == generated


def test_bad_request_never_reaches_an_engine(pair):
    before = pair.gauge("flare_requests_admitted_total")
    assert pair.post(top_p=7).status_code == 400
    assert pair.post(model="other", stream=True).status_code == 404
    assert pair.post(prompt="x" * 9000).status_code == 400
    time.sleep(REPORT_S)
    assert pair.gauge("flare_requests_admitted_total") == before


def test_overload_is_429_with_retry_after_before_any_stream(single):
    async def flood() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60.0) as client:
            body = completion(max_tokens=600, stream=True)
            calls = [client.post(f"{single.url}/v1/completions", json=body) for _ in range(12)]
            return await asyncio.gather(*calls)

    answers = asyncio.run(flood())
    refused = [answer for answer in answers if answer.status_code == 429]
    served = [answer for answer in answers if answer.status_code == 200]
    assert len(refused) + len(served) == 12
    assert refused
    assert len(served) >= 4
    for answer in refused:
        assert answer.headers["retry-after"] == "3"
        assert answer.json()["error"]["code"] == "overloaded"
    for answer in served:
        assert texts(answer.text.splitlines())[0] == alphabet_from("a", 600)


def test_killed_rank_ends_open_streams_and_the_waiting_request_is_answered_by_the_next_engine(
    single,
):
    """Two requests hold both slots and have output; a third waits and has none."""
    killed_s = 0.0
    errors: list[tuple[float, dict]] = []
    started = asyncio.Event()

    async def running(client: httpx.AsyncClient) -> None:
        body = completion(max_tokens=8000, ignore_eos=True, stream=True)
        url = f"{single.url}/v1/completions"
        async with client.stream("POST", url, json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    errors.append((time.monotonic(), chunk["error"]))
                started.set()

    async def scenario() -> httpx.Response:
        nonlocal killed_s
        pids = await asyncio.to_thread(
            lambda: single.engine.rank_pids.remote().result(timeout_s=20)
        )
        async with httpx.AsyncClient(timeout=90.0) as client:
            streams = [asyncio.create_task(running(client)) for _ in range(2)]
            await asyncio.wait_for(started.wait(), 20.0)
            body = completion(prompt="k", max_tokens=30)
            waiting = asyncio.create_task(client.post(f"{single.url}/v1/completions", json=body))
            await asyncio.sleep(0.5)
            killed_s = time.monotonic()
            os.kill(pids[1], signal.SIGKILL)
            await asyncio.gather(*streams)
            return await waiting

    answer = asyncio.run(scenario())
    assert len(errors) == 2
    for told_s, error in errors:
        assert told_s - killed_s < ERROR_LIMIT_S
        assert error["code"] == "rank_failure"
        assert "rank 1" in error["message"]
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == alphabet_from("k", 30)
    assert time.monotonic() - killed_s < RECOVERY_LIMIT_S
    wait_until(lambda: single.get("/health").status_code == 200, RECOVERY_LIMIT_S)
    wait_until(single.idle, FREE_LIMIT_S)


def documents(config, port: int, name: str) -> dict:
    """A deployment file for one application."""
    return {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": name,
                "route_prefix": f"/{name}",
                "import_path": "flare_ray.frontend.app:build",
                "args": config.model_dump(mode="json", exclude_unset=True),
            }
        ],
    }


@pytest.mark.parametrize("missing", ["checkpoint", pytest.param("cpus", marks=pytest.mark.slow)])
def test_deployment_that_could_only_wait_fails_by_name_in_time(checkpoint, port, missing):
    if missing == "checkpoint":
        config, told = served_deployment("/none/such"), "/none/such"
        kind = ConfigError
    else:
        config, told = served_deployment(checkpoint, engines=50), "50 engine"
        kind = CapacityError
    name = f"failing-{missing}"
    document = documents(config, port, name)
    server = LocalServe(document, [config])
    with pytest.raises(kind, match=told) as refusal:
        server.start()
    assert "-demo.yaml" in str(refusal.value)
    # What plain `serve run` does: no check before the application is built on the cluster.
    started = time.monotonic()
    _get_global_client().deploy_apps(server._schema)
    with pytest.raises(FlareError, match=told) as failure:
        wait_until(server.poll, REFUSAL_LIMIT_S)
    assert "-demo.yaml" in str(failure.value)
    assert time.monotonic() - started < REFUSAL_LIMIT_S
    assert serve.status().applications[name].status == "DEPLOY_FAILED"
