"""The anthropic package against a real socket: streaming and not, a full tool loop, errors."""

from collections.abc import Callable, Iterator

import anthropic
import pytest

from flare_ray.contracts.messages import Delta, Failed
from flare_ray.errors import Overloaded
from tests.support.fake_engine_client import FakeEngineClient, answer, byte_tokens
from tests.support.http_server import chat_codec, http_server, wait_running

CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome €</arg_value></tool_call>"
TOOL = {
    "name": "weather",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Iterator[tuple[FakeEngineClient, anthropic.Anthropic]]:
    codec = chat_codec(tmp_path_factory.mktemp("checkpoint"))
    with (
        http_server(codec, free_port()) as (engine, url),
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=20.0) as sdk,
    ):
        yield engine, sdk


def ask(sdk, **fields):
    return sdk.messages.create(model="tiny", max_tokens=60, **{"messages": HI, **fields})


def test_message_whole(served):
    engine, sdk = served
    engine.script = answer("why</think>because €")
    message = ask(sdk, thinking={"type": "adaptive"})
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "why"
    assert message.content[1].text == "because €"
    assert message.stop_reason == "end_turn"
    assert message._request_id == message.id.removeprefix("msg_")


def test_message_stream(served):
    engine, sdk = served
    engine.script = answer("why</think>because €", step=1)
    with sdk.messages.stream(model="tiny", max_tokens=60, messages=HI) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == "because €"
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == len(byte_tokens("why</think>because €")) + 1


@pytest.mark.parametrize("stream", [False, True])
def test_tool_loop(served, stream):
    engine, sdk = served
    fields = {"model": "tiny", "max_tokens": 90, "tools": [TOOL]}

    def turn(messages):
        if not stream:
            return sdk.messages.create(messages=messages, **fields)
        with sdk.messages.stream(messages=messages, **fields) as events:
            return events.get_final_message()

    engine.script = answer(f"</think>{CALL}{CALL}", step=5)
    first = turn(HI)
    assert first.stop_reason == "tool_use"
    uses = [block for block in first.content if block.type == "tool_use"]
    assert [use.input for use in uses] == [{"city": "Rome €"}] * 2
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": f"sun {i}"}
        for i, use in enumerate(uses)
    ]
    engine.script = answer("</think>sunny")
    history = [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    last = turn([*HI, *history])
    assert last.content[0].text == "sunny"
    assert last.stop_reason == "end_turn"


def test_count_tokens(served):
    engine, sdk = served
    engine.script = answer("</think>x")
    count = sdk.messages.count_tokens(model="tiny", messages=HI, system="s")
    message = ask(sdk, system="s")
    assert count.input_tokens == message.usage.input_tokens


def test_errors_are_the_packages_own(served):
    engine, sdk = served
    with pytest.raises(anthropic.NotFoundError):
        sdk.messages.create(model="other", max_tokens=5, messages=HI)
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        ask(sdk, messages=[])
    engine.refusal = Overloaded("full", retry_after_s=3.0)
    with pytest.raises(anthropic.InternalServerError) as caught:
        ask(sdk)
    engine.refusal = None
    assert caught.value.status_code == 529
    assert caught.value.response.headers["retry-after"] == "3"


def test_failure_inside_a_stream_is_raised(served):
    engine, sdk = served
    engine.script = lambda request: [
        Delta(request.request_id, byte_tokens("</think>ab")),
        Failed(request.request_id, "rank_failure", "rank 1 died", status=503),
    ]
    with (
        pytest.raises(anthropic.APIStatusError, match="rank 1 died"),
        sdk.messages.stream(model="tiny", max_tokens=60, messages=HI) as stream,
    ):
        stream.get_final_message()


def test_client_that_leaves_cancels_its_request(served):
    engine, sdk = served
    engine.script = answer("</think>" + "x" * 3000, step=1, pause=0.01)
    with sdk.messages.stream(model="tiny", max_tokens=60, messages=HI) as stream:
        next(iter(stream.text_stream))
    wait_running(engine)
    assert len(engine.cancelled) == 1
