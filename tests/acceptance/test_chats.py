"""Two HTTP replicas and two engines under `flare-ray serve`, asked by the openai package: every
client gets its own tokens, clients that leave free everything, bad input disturbs nobody
(contract: A2, A3, A4; known faults H-18, probes 3, 4, 12).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.acceptance.conftest import Greedy
from tests.support.served_glm import MODEL, deployment_args
from tests.support.service import Service, wait_for, write_deployment

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

FREE_LIMIT_S = 20.0
"""Seconds until the last cancellation has reached an engine and its report the metrics."""
ANSWER_LIMIT_S = 120.0
CONTEXT = 512
SUBJECTS = (
    *("a red fox", "two boats", "old maps", "a tin drum", "some snow", "the tall tower"),
    *("his sister", "an owl", "green tea", "a long road", "paper", "one coin"),
    *("the mill", "her garden", "north wind", "a small door"),
)


@pytest.fixture(scope="module")
def service(
    checkpoint: Path, greedy: Greedy, tmp_path_factory: pytest.TempPathFactory, free_port
) -> Iterator[Service]:
    """Two of each. The greedy texts are computed first: the cores are free then."""
    for number in range(16):
        greedy(prompt_of(number), length_of(number), chat=True)
    file = tmp_path_factory.mktemp("pair") / "pair.yaml"
    args = deployment_args(checkpoint, engines=2, ingresses=2, context_tokens=CONTEXT)
    service = Service(write_deployment(file, args, free_port()))
    try:
        service.wait_ready()
        wait_for(lambda: engines_of(service) == 2, ANSWER_LIMIT_S, "both engines report")
        yield service
    finally:
        service.kill()


def prompt_of(number: int) -> str:
    return f"Tell me about {SUBJECTS[number]} and {number} more."


def length_of(number: int) -> int:
    return 24 + 3 * number


def engines_of(service: Service) -> int:
    answer = service.get("/metrics")
    assert answer is not None
    lines = answer.text.splitlines()
    return sum(line.startswith("flare_num_requests_running{") for line in lines)


def client_of(service: Service) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_LIMIT_S
    )


async def chat(client: openai.AsyncOpenAI, number: int, *, max_tokens: int, stream: bool) -> str:
    """One conversation; all text of its answer. The model says no closing tag, so that all of it is
    reasoning."""
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt_of(number)}],
        temperature=0,
        max_tokens=max_tokens,
        stream=stream,
    )
    if not stream:
        message = answer.choices[0].message
        return (message.reasoning_content or "") + (message.content or "")
    pieces: list[str] = []
    async for chunk in answer:
        delta = chunk.choices[0].delta
        pieces.append(getattr(delta, "reasoning_content", None) or delta.content or "")
    return "".join(pieces)


def test_sixteen_chats_over_two_replicas_of_each_get_their_own_tokens(service, greedy):
    async def all_at_once() -> list[str]:
        async with client_of(service) as client:
            return await asyncio.gather(
                *(
                    chat(client, number, max_tokens=length_of(number), stream=number % 2 == 0)
                    for number in range(16)
                )
            )

    before = rounds_by_engine(service)
    texts = asyncio.run(all_at_once())
    for number, text in enumerate(texts):
        assert text == greedy(prompt_of(number), length_of(number), chat=True), number
    service.wait_idle(FREE_LIMIT_S)
    worked = {e for e, rounds in rounds_by_engine(service).items() if rounds > before.get(e, 0)}
    assert len(worked) == 2, "one engine served all: the test proves nothing about two"


def rounds_by_engine(service: Service) -> dict[str, float]:
    answer = service.get("/metrics")
    assert answer is not None
    found: dict[str, float] = {}
    for line in answer.text.splitlines():
        if line.startswith("flare_prompt_tokens_total{"):
            labels, _, value = line.rpartition(" ")
            found[labels] = float(value)
    return found


def test_clients_that_leave_at_random_leave_nothing_running_and_every_page_free(
    service, random_seed
):
    """Eight chats at a time, streaming and not; most leave, some before their first token."""
    chance = random.Random(random_seed)
    left = served = 0

    async def one(client: openai.AsyncOpenAI, number: int, stay_s: float | None) -> str | None:
        length = 40 if stay_s is None else CONTEXT // 2
        work = chat(client, number, max_tokens=length, stream=bool(number % 2))
        try:
            return await asyncio.wait_for(work, stay_s)
        except TimeoutError:
            return None

    async def wave() -> list[tuple[float | None, str | None]]:
        # Two stay for sure; the others for a moment, which may be too short to be admitted.
        stays = [None, None, *(chance.uniform(0.0, 0.8) for _ in range(6))]
        chance.shuffle(stays)
        async with client_of(service) as client:
            texts = await asyncio.gather(*(one(client, n, s) for n, s in enumerate(stays)))
        return list(zip(stays, texts, strict=True))

    for _ in range(3):
        for stay_s, text in asyncio.run(wave()):
            left += text is None
            served += text is not None
            if stay_s is None:
                assert text is not None and len(text) == 40
    service.wait_idle(FREE_LIMIT_S)
    assert left >= 3 and served >= 6, f"{left} left, {served} stayed: the test proves nothing"
    generated = service.gauge("flare_generation_tokens_total")
    time.sleep(3.0)
    assert service.gauge("flare_generation_tokens_total") == generated
    assert service.idle()


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
BAD = {
    "malformed": (CHAT, b'{"model": "glm-micro", "messages": [', 400, "invalid_json", None),
    "no_object": (CHAT, b"[1, 2]", 400, "invalid_json", None),
    "not_utf8": (COMPLETION, b'{"model": "\xff"}', 400, "invalid_json", None),
    "nan": (COMPLETION, b'{"model": "glm-micro", "temperature": NaN}', 400, "invalid_json", None),
    "messages_text": (CHAT, {"messages": "hello"}, 400, None, "messages"),
    "content_number": (CHAT, {"messages": [{"role": "user", "content": 7}]}, 400, None, None),
    "no_messages": (CHAT, {"messages": []}, 400, None, "messages"),
    "absent_messages": (CHAT, {}, 400, "missing_required_parameter", "messages"),
    "max_tokens_text": (CHAT, {"messages": HELLO, "max_tokens": "7"}, 400, None, "max_tokens"),
    "max_tokens_zero": (CHAT, {"messages": HELLO, "max_tokens": 0}, 400, None, "max_tokens"),
    "stream_text": (CHAT, {"messages": HELLO, "stream": "yes"}, 400, None, "stream"),
    "unknown_model": (CHAT, {"model": "gpt-0", "messages": HELLO}, 404, "model_not_found", "model"),
    "unknown_model_stream": (
        COMPLETION,
        {"model": "gpt-0", "prompt": "a", "stream": True},
        404,
        "model_not_found",
        "model",
    ),
    "unknown_parameter": (CHAT, {"messages": HELLO, "tempature": 1}, 400, None, "tempature"),
    "unbuilt_parameter": (
        CHAT,
        {"messages": HELLO, "modalities": ["text", "audio"]},
        400,
        "unsupported_parameter",
        "modalities",
    ),
    "stop_number": (CHAT, {"messages": HELLO, "stop": 7}, 400, None, "stop"),
    "stop_empty": (CHAT, {"messages": HELLO, "stop": [""]}, 400, None, "stop"),
    "stop_mixed": (COMPLETION, {"prompt": "a", "stop": ["a", 7]}, 400, None, "stop[1]"),
    "temperature_negative": (
        COMPLETION,
        {"prompt": "a", "temperature": -0.1},
        400,
        None,
        "temperature",
    ),
    "temperature_text": (CHAT, {"messages": HELLO, "temperature": "1"}, 400, None, "temperature"),
    "temperature_true": (CHAT, {"messages": HELLO, "temperature": True}, 400, None, "temperature"),
    "top_p_above": (COMPLETION, {"prompt": "a", "top_p": 1.01}, 400, None, "top_p"),
    "top_p_negative": (COMPLETION, {"prompt": "a", "top_p": -0.5}, 400, None, "top_p"),
    "empty_prompt": (COMPLETION, {"prompt": ""}, 400, None, "prompt"),
    "prompt_ids": (COMPLETION, {"prompt": [1, 99999]}, 400, None, "prompt"),
    "image": (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        400,
        None,
        None,
    ),
}


@pytest.fixture(scope="module")
def disturbed(service, greedy) -> dict[str, httpx.Response]:
    """Answers to all bad requests, each sent while good ones stream; the good ones are checked."""
    length = 320
    expected = greedy(prompt_of(3), length, chat=True)
    answers: dict[str, httpx.Response] = {}
    texts: list[str] = []

    async def scenario() -> None:
        done = asyncio.Event()

        async def keep_asking(client: openai.AsyncOpenAI) -> None:
            while not done.is_set():
                texts.append(await chat(client, 3, max_tokens=length, stream=True))

        async with client_of(service) as good, httpx.AsyncClient(timeout=ANSWER_LIMIT_S) as bad:
            streams = [asyncio.create_task(keep_asking(good)) for _ in range(4)]
            for name, (path, body, *_) in BAD.items():
                if isinstance(body, bytes):
                    json_type = {"content-type": "application/json"}
                    answer = await bad.post(service.url + path, content=body, headers=json_type)
                else:
                    whole = {"model": MODEL, **body}
                    answer = await bad.post(service.url + path, json=whole)
                answers[name] = answer
            done.set()
            await asyncio.gather(*streams)

    admitted = service.gauge("flare_requests_admitted_total")
    asyncio.run(scenario())
    assert len(texts) >= 4 and set(texts) == {expected}
    service.wait_idle(FREE_LIMIT_S)
    through = service.gauge("flare_requests_admitted_total") - admitted
    assert through == len(texts), "a bad one got through"
    return answers


@pytest.mark.parametrize("name", BAD)
def test_bad_request_is_refused_in_openai_shape_while_good_ones_stream(disturbed, name):
    _, _, status, code, param = BAD[name]
    answer = disturbed[name]
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    if code is not None:
        assert error["code"] == code
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_beyond_the_context_is_refused_with_both_numbers(service, stream):
    body = {"model": MODEL, "prompt": "x" * 700, "stream": stream}
    answer = httpx.post(f"{service.url}{COMPLETION}", json=body, timeout=ANSWER_LIMIT_S)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "700 tokens" in error["message"] and str(CONTEXT) in error["message"]


def test_sdk_raises_its_own_exceptions(service):
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-0", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=HELLO, top_p=7, stream=True)
    assert refused.value.param == "top_p"
    assert [model.id for model in client.models.list()] == [MODEL]
