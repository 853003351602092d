"""The openai package against a real socket: streaming and not, clients that leave at random."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import openai
import pytest

from flare_ray.contracts.messages import Delta, Failed, Finished
from flare_ray.errors import Overloaded
from flare_ray.frontend.tokenizer import TextCodec
from tests.support.fake_engine_client import FakeEngineClient, Script, answer, byte_tokens
from tests.support.http_server import chat_codec, http_server, wait_running

NUMBERS = range(10, 34)
"""Of two digits, so that none is the beginning of another."""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return chat_codec(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def serve(codec: TextCodec, free_port: Callable[[], int]):
    """Context manager: a server over a script; yields its fake engine and the base URL."""

    @contextmanager
    def running(script: Script) -> Iterator[tuple[FakeEngineClient, str]]:
        with http_server(codec, free_port(), script) as (client, url):
            yield client, f"{url}/v1"

    return running


def connect(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20.0)


def test_chat_whole(serve):
    with serve(answer("why</think>because €")) as (_, url):
        completion = connect(url).chat.completions.create(model="tiny", messages=HI)
    message = completion.choices[0].message
    assert message.content == "because €"
    assert message.reasoning_content == "why"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage.completion_tokens == len(byte_tokens("why</think>because €")) + 1


def test_chat_stream_with_usage(serve):
    with serve(answer("why</think>because €", step=1)) as (_, url):
        stream = connect(url).chat.completions.create(
            model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "because €"
    assert chunks[-1].usage.completion_tokens == len(byte_tokens("why</think>because €")) + 1


def test_stream_helper_assembles_tool_calls(serve):
    call = "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
    with serve(answer(f"</think>{call}{call}")) as (_, url):
        client = connect(url).chat.completions
        with client.stream(model="tiny", messages=HI, tools=[TOOL]) as stream:
            final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert [c.function.arguments for c in calls] == ['{"city": "Rome"}'] * 2
    assert final.choices[0].finish_reason == "tool_calls"


def test_text_completion_and_models(serve):
    with serve(answer("</think>x")) as (_, url):
        client = connect(url)
        assert client.completions.create(model="tiny", prompt="a").choices[0].text == "</think>x"
        streamed = client.completions.create(model="tiny", prompt="a", stream=True)
        assert "".join(c.choices[0].text for c in streamed) == "</think>x"
        assert [model.id for model in client.models.list()] == ["tiny"]


def test_errors_become_the_sdks_own_exceptions(serve):
    with serve(answer("x")) as (engine, url):
        client = connect(url).chat.completions
        with pytest.raises(openai.NotFoundError) as unknown:
            client.create(model="other", messages=HI)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            client.create(model="tiny", messages=HI, temperature=-1, stream=True)
        assert bad.value.param == "temperature"
        engine.refusal = Overloaded("full", retry_after_s=3)
        with pytest.raises(openai.RateLimitError) as full:
            client.create(model="tiny", messages=HI, stream=True)
        assert full.value.response.headers["retry-after"] == "3"


def test_failure_inside_a_stream_raises_in_the_sdk(serve):
    def script(request):
        return [
            Delta(request.request_id, byte_tokens("</think>ab")),
            Failed(request.request_id, "rank_failure", "rank 0 died", status=503),
        ]

    with serve(script) as (_, url):
        stream = connect(url).chat.completions.create(model="tiny", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="rank 0 died"):
            list(stream)


def test_clients_that_leave_at_random_leave_nothing_running(serve, random_seed):
    chance = random.Random(random_seed)

    async def chat(
        client: openai.AsyncOpenAI, number: int, stay_s: float | None, engine: FakeEngineClient
    ) -> str | None:
        async def whole() -> str:
            result = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": f"n{number}"}],
                stream=number % 2 == 0,
            )
            if number % 2:
                return result.choices[0].message.content
            return "".join([c.choices[0].delta.content or "" async for c in result])

        task = asyncio.create_task(whole())
        if stay_s is not None:
            mine = byte_tokens(f"n{number}")
            while not any(mine in pairs(r.prompt_tokens, len(mine)) for r in engine.requests):
                await asyncio.sleep(0.001)
            await asyncio.sleep(stay_s)
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            return None

    def pairs(tokens: tuple[int, ...], size: int) -> set[tuple[int, ...]]:
        return {tokens[i : i + size] for i in range(len(tokens))}

    byte_of = {byte_tokens(bytes([byte]))[0]: byte for byte in range(256)}

    def script(request):
        # The request's own number comes back, so that a mix-up of streams would show.
        prompt = bytes(byte_of[t] for t in request.prompt_tokens if t in byte_of).decode()
        text = prompt.removeprefix("effort max").removesuffix("<think>")
        return answer(f"</think>{text}" + "." * 20, step=1, pause=0.005)(request)

    async def scenario(
        url: str, engine: FakeEngineClient
    ) -> list[tuple[float | None, int, str | None]]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stays = [None if n % 3 == 0 else chance.uniform(0, 0.1) for n in NUMBERS]
            chats = (chat(client, n, s, engine) for n, s in zip(NUMBERS, stays, strict=True))
            texts = await asyncio.gather(*chats)
        return list(zip(stays, NUMBERS, texts, strict=True))

    with serve(script) as (engine, url):
        results = asyncio.run(scenario(url, engine))
        wait_running(engine)
    for stay, number, text in results:
        if stay is None:
            assert text == f"n{number}" + "." * 20
    assert engine.cancelled, "no client left in time; the test would prove nothing"


def test_whole_answer_with_an_endless_request_stops_when_the_client_hangs_up(serve):
    def script(request):
        return [Delta(request.request_id, byte_tokens("a")), 3600.0, finished(request)]

    def finished(request):
        return Finished(request.request_id, "length", 1, 1)

    with serve(script) as (engine, url):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=0.2)
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(
                model="tiny", messages=HI, max_tokens=100, extra_body={"ignore_eos": True}
            )
        wait_running(engine)
        assert len(engine.cancelled) == 1
