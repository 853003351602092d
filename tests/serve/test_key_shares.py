"""API keys over a whole server: weights decide who is served under saturation, limits who is sent
away, and both follow the file while it runs (contract: A3)."""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.serve.processes import deployment_file, running
from tests.support.served_checkpoint import served_checkpoint, served_deployment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

START_LIMIT_S = 60.0
SLOTS = 2
WORKERS = 8
"""Requests that each key keeps open: more than there are slots, so that some always wait."""
REQUEST_TOKENS = 100
WINDOW_TOKENS = 16_000
TOLERANCE = 0.25
"""The stated bound, 2 x slots x (prompt + output) tokens per weight, is a tenth of the window."""
RELOAD_LIMIT_S = 10.0
SECRETS = {name: f"secret-of-key-{name}-0123" for name in ("heavy", "light", "limited")}


def key_file(path: Path, *, weights: dict[str, float], limit: int | None = None) -> None:
    """Replace the file in one step, as a mounted secret is."""
    keys = [
        {"name": name, "key": SECRETS[name], "weight": weight} for name, weight in weights.items()
    ]
    if limit is not None:
        keys.append({"name": "limited", "key": SECRETS["limited"], "requests_per_minute": limit})
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"keys": keys}))
    fresh.replace(path)


@pytest.fixture(scope="module")
def served(tmp_path_factory, free_port: Callable[[], int]):
    folder = tmp_path_factory.mktemp("keys")
    keys = folder / "keys.json"
    key_file(keys, weights={"light": 1.0, "heavy": 3.0}, limit=2)
    config = served_deployment(
        served_checkpoint(tmp_path_factory.mktemp("letters")), concurrency=SLOTS
    )
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = ("debug-serve", str(deployment_file(folder, config, port)), "--port", str(port))
    with running(
        *(*arguments, "--keys-file", str(keys)),
        log=folder / "server.log",
        url=url,
        start_limit_s=START_LIMIT_S,
        number=signal.SIGINT,
    ):
        yield url, keys


def ask(url: str, name: str) -> httpx.Response:
    body = {"model": "letters", "prompt": "a", "max_tokens": 1}
    headers = {"authorization": f"Bearer {SECRETS[name]}"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=20.0)


def served_tokens(url: str, names: tuple[str, ...]) -> Counter[str]:
    """Tokens that each key was served until all had WINDOW_TOKENS, while all of them wait."""
    served: Counter[str] = Counter()

    async def work(client: httpx.AsyncClient, name: str) -> None:
        body = {
            "model": "letters",
            "prompt": "a",
            "max_tokens": REQUEST_TOKENS,
            "temperature": 0,
        }
        headers = {"authorization": f"Bearer {SECRETS[name]}"}
        while served.total() < WINDOW_TOKENS:
            answer = await client.post(f"{url}/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            if served.total() < WINDOW_TOKENS:
                served[name] += answer.json()["usage"]["completion_tokens"]

    async def scenario() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=60.0) as client:
            await asyncio.gather(*(work(client, name) for name in names for _ in range(WORKERS)))

    asyncio.run(scenario())
    return served


def wait_for_weights(url: str, name: str, status: int) -> None:
    """Until the changed file is in force, which `name`'s status tells."""

    async def look() -> None:
        while ask(url, name).status_code != status:
            await asyncio.sleep(0.1)

    asyncio.run(asyncio.wait_for(look(), RELOAD_LIMIT_S))


def test_keys_are_served_by_weight_and_a_changed_file_changes_the_shares(served):
    url, keys = served
    key_file(keys, weights={"light": 1.0, "heavy": 3.0}, limit=2)
    first = served_tokens(url, ("light", "heavy"))
    assert first["heavy"] / first["light"] == pytest.approx(3.0, rel=TOLERANCE)
    key_file(keys, weights={"light": 3.0, "heavy": 1.0})
    wait_for_weights(url, "limited", 401)
    second = served_tokens(url, ("light", "heavy"))
    assert second["light"] / second["heavy"] == pytest.approx(3.0, rel=TOLERANCE)


def test_limited_key_is_sent_away_and_a_changed_file_lifts_its_limit(served):
    url, keys = served
    key_file(keys, weights={"light": 1.0}, limit=2)
    wait_for_weights(url, "heavy", 401)
    assert [ask(url, "limited").status_code for _ in range(2)] == [200, 200]
    refused = ask(url, "limited")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 0 < int(refused.headers["retry-after"]) <= 30
    assert ask(url, "light").status_code == 200
    key_file(keys, weights={"light": 1.0}, limit=10_000)
    wait_for_weights(url, "limited", 200)
