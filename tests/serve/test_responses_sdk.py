"""The openai package's Responses client against a real socket."""

from collections.abc import Callable, Iterator

import openai
import pytest

from tests.support.fake_engine_client import FakeEngineClient, answer
from tests.support.http_server import chat_codec, http_server

CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome €</arg_value></tool_call>"
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Iterator[tuple[FakeEngineClient, openai.OpenAI]]:
    codec = chat_codec(tmp_path_factory.mktemp("checkpoint"))
    with (
        http_server(codec, free_port()) as (engine, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20.0) as sdk,
    ):
        yield engine, sdk


def test_response_whole(served):
    engine, sdk = served
    engine.script = answer("why</think>because €")
    response = sdk.responses.create(model="tiny", input="hi")
    assert response.output_text == "because €"
    assert response.output[0].content[0].text == "why"
    assert response.status == "completed"


def test_response_stream(served):
    engine, sdk = served
    engine.script = answer("why</think>because €", step=1)
    with sdk.responses.stream(model="tiny", input="hi") as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "because €"
    assert final.usage.output_tokens_details.reasoning_tokens == len("why</think>")


@pytest.mark.parametrize("stream", [False, True])
def test_tool_loop(served, stream):
    engine, sdk = served

    def turn(items):
        if not stream:
            return sdk.responses.create(model="tiny", input=items, tools=[TOOL])
        with sdk.responses.stream(model="tiny", input=items, tools=[TOOL]) as events:
            return events.get_final_response()

    engine.script = answer(f"hm</think>{CALL}{CALL}", step=5)
    items = [{"role": "user", "content": "hi"}]
    first = turn(items)
    calls = [item for item in first.output if item.type == "function_call"]
    assert [call.arguments for call in calls] == ['{"city": "Rome €"}'] * 2
    items += first.output
    items += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls
    ]
    engine.script = answer("</think>sunny")
    assert turn(items).output_text == "sunny"


def test_answer_that_was_dumped_may_be_sent_back(served):
    engine, sdk = served
    engine.script = answer(f"hm</think>look{CALL}")
    first = sdk.responses.create(model="tiny", input="hi", tools=[TOOL])
    items = [item.model_dump(mode="json") for item in first.output]
    output = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "sun"}
    last = sdk.responses.create(model="tiny", input=[*items, output], tools=[TOOL])
    assert last.status == "completed"


def test_errors_are_the_packages_own(served):
    _, sdk = served
    with pytest.raises(openai.NotFoundError):
        sdk.responses.create(model="other", input="hi")
    with pytest.raises(openai.BadRequestError, match="store"):
        sdk.responses.create(model="tiny", input="hi", store=True)
    with pytest.raises(openai.NotFoundError, match="stored responses"):
        sdk.responses.retrieve("resp_1")
