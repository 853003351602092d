"""`flare-ray debug-serve`: the whole path in one process, over the scripted recipe."""

import asyncio
import random
import signal
import time
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from tests.serve.processes import deployment_file, gauge, running
from tests.support.served_checkpoint import alphabet_from, served_checkpoint, served_deployment

pytestmark = pytest.mark.timeout(120)

START_LIMIT_S = 60.0
FREE_LIMIT_S = 10.0
NUM_CHATS = 8
LONG_TOKENS = 2000


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    checkpoint = served_checkpoint(tmp_path_factory.mktemp("letters"))
    config = served_deployment(checkpoint, concurrency=4)
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    arguments = ("debug-serve", str(deployment_file(folder, config, port)), "--port", str(port))
    log = folder / "server.log"
    with running(
        *arguments, log=log, url=address, start_limit_s=START_LIMIT_S, number=signal.SIGINT
    ):
        yield address


def test_completion_and_chat_answer_with_the_models_text(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    settings = {"model": "letters", "temperature": 0, "max_tokens": 30}
    answer = client.completions.create(prompt="k", **settings)
    assert answer.choices[0].text == alphabet_from("k", 30)
    assert answer.choices[0].finish_reason == "length"
    stream = client.chat.completions.create(
        messages=[{"role": "user", "content": "x"}], stream=True, **settings
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == alphabet_from("z", 30)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "include", "text"),
    [("ghi", False, "bcdef"), ("ghi", True, "bcdefghi"), (["zz", "c"], False, "b")],
)
def test_stop_string_ends_the_visible_text(url, stream, stop, include, text):
    body = {
        "model": "letters",
        "prompt": "a",
        "temperature": 0,
        "max_tokens": 60,
        "stop": stop,
        "include_stop_str_in_output": include,
        "stream": stream,
    }
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    extra = {"include_stop_str_in_output": body.pop("include_stop_str_in_output")}
    answer = client.completions.create(**body, extra_body=extra)
    choices = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == text
    assert choices[-1].finish_reason == "stop"


def test_chats_with_random_disconnects_leave_nothing_running(url, random_seed):
    chance = random.Random(random_seed)

    async def chat(client: openai.AsyncOpenAI, number: int, stay_s: float | None) -> str | None:
        letter = "abcdefgh"[number]
        tokens = 50 + number if stay_s is None else LONG_TOKENS

        async def ask() -> str:
            answer = await client.completions.create(
                model="letters",
                prompt=letter,
                temperature=0,
                max_tokens=tokens,
                stream=number % 2 == 0,
            )
            if number % 2:
                return answer.choices[0].text
            return "".join([chunk.choices[0].text async for chunk in answer])

        try:
            text = await asyncio.wait_for(ask(), stay_s)
        except TimeoutError:
            return None
        assert text == alphabet_from(letter, tokens)
        return text

    async def scenario() -> list[str | None]:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0
        ) as client:
            stays = [None if n % 3 == 0 else chance.uniform(0.0, 0.2) for n in range(NUM_CHATS)]
            chats = (chat(client, number, stay) for number, stay in enumerate(stays))
            return await asyncio.gather(*chats)

    texts = asyncio.run(scenario())
    assert sum(text is None for text in texts) > 0, "nobody left; the test would prove nothing"
    deadline = time.monotonic() + FREE_LIMIT_S
    while gauge(url, "flare_num_requests_running") or gauge(url, "flare_num_requests_waiting"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while gauge(url, "flare_pages_free") != gauge(url, "flare_pages"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    generated = gauge(url, "flare_generation_tokens_total")
    time.sleep(0.3)
    assert gauge(url, "flare_generation_tokens_total") == generated


def test_prompt_beyond_the_context_is_refused_with_both_numbers(url):
    body = {"model": "letters", "prompt": "a" * 9000}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=10.0)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "9000" in message
    assert "8192" in message
