"""One scripted suite through several client libraries over a real socket: chat, stream, a full tool
loop, a JSON schema, log-probabilities, errors, and leaving early (contract: A3).

litellm and langchain-openai come with the `clients` extra; the Node SDK is looked for in the folder
that FLARE_NODE_MODULES names (`npm install openai` there). Without them their tests are skipped.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import openai
import pytest
from pydantic import BaseModel

from tests.support.client_script import (
    DOCUMENT,
    ENDLESS,
    GREETING,
    RESULT,
    VERDICT,
    WEATHER_PARAMETERS,
    client_script,
)
from tests.support.http_server import chat_codec, http_server, wait_running

NODE_LIMIT_S = 60.0
HI = [{"role": "user", "content": "hi"}]
ASK = [{"role": "user", "content": "how is the weather?"}]
FOREVER = [{"role": "user", "content": ENDLESS}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER_PARAMETERS}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": WEATHER_PARAMETERS}}


class Place(BaseModel, extra="forbid"):
    city: str


@pytest.fixture(scope="module")
def served(tmp_path_factory, free_port):
    codec = chat_codec(tmp_path_factory.mktemp("checkpoint"))
    with http_server(codec, free_port(), client_script) as (engine, url):
        yield engine, f"{url}/v1"


def with_results(calls):
    """The next turn: the question, the calls as the assistant's message, a result for each."""
    assistant = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in calls
        ],
    }
    results = [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in calls]
    return [*ASK, assistant, *results]


# The openai package; chat, stream, errors and leaving are in test_openai_sdk.py.


@pytest.fixture
def sdk(served):
    with openai.OpenAI(base_url=served[1], api_key="none", max_retries=0, timeout=20.0) as client:
        yield client.chat.completions


@pytest.mark.parametrize("stream", [False, True])
def test_openai_tool_loop(sdk, stream):
    def turn(messages):
        if not stream:
            return sdk.create(model="tiny", messages=messages, tools=[TOOL]).choices[0]
        with sdk.stream(model="tiny", messages=messages, tools=[TOOL]) as events:
            return events.get_final_completion().choices[0]

    first = turn(ASK)
    assert first.finish_reason == "tool_calls"
    calls = first.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Rome €"}] * 2
    assert turn(with_results(calls)).message.content == VERDICT


def test_openai_json_schema(sdk):
    parsed = sdk.parse(model="tiny", messages=HI, response_format=Place)
    assert parsed.choices[0].message.parsed == Place(city="Rome")


def test_openai_logprobs(sdk):
    choice = sdk.create(model="tiny", messages=HI, logprobs=True, top_logprobs=1).choices[0]
    entries = choice.logprobs.content
    assert [entry.logprob for entry in entries] == [-i / 8 for i in range(len(entries))]
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)


# litellm.


@pytest.fixture
def lite(served):
    litellm = pytest.importorskip("litellm", reason="litellm is not installed (extra: clients)")

    def complete(**fields):
        common = {"model": "openai/tiny", "api_base": served[1], "api_key": "none"}
        return litellm.completion(**common, num_retries=0, timeout=20.0, **fields)

    return litellm, complete


def test_litellm_chat_and_stream(lite):
    _, complete = lite
    assert complete(messages=HI).choices[0].message.content == GREETING
    chunks = complete(messages=HI, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == GREETING


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_tool_loop(lite, stream):
    """Known fault litellm#37792: parallel calls keep their own index and id in a stream."""
    litellm, complete = lite
    answer = complete(messages=ASK, tools=[TOOL], stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    message = answer.choices[0].message
    calls = message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Rome €"}] * 2
    assert len({call.id for call in calls}) == 2
    last = complete(messages=with_results(calls), tools=[TOOL])
    assert last.choices[0].message.content == VERDICT


def test_litellm_json_schema_and_logprobs(lite):
    _, complete = lite
    content = complete(messages=HI, response_format=FORMAT).choices[0].message.content
    assert content == DOCUMENT
    scored = complete(messages=HI, logprobs=True, top_logprobs=1).choices[0]
    assert scored.logprobs.content[1].logprob == -1 / 8


def test_litellm_errors_and_leaving(lite, served):
    litellm, complete = lite
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        complete(messages=HI, temperature=-1)
    stream = complete(messages=FOREVER, stream=True)
    next(iter(stream))
    stream.completion_stream.response.close()
    wait_running(served[0])


# langchain-openai.


@pytest.fixture
def chain(served):
    reason = "langchain-openai is not installed (extra: clients)"
    library = pytest.importorskip("langchain_openai", reason=reason)
    return library.ChatOpenAI(
        model="tiny", base_url=served[1], api_key="none", max_retries=0, timeout=20.0
    )


def test_langchain_chat_and_stream(chain):
    assert chain.invoke("hi").content == GREETING
    assert "".join(chunk.content for chunk in chain.stream("hi")) == GREETING


@pytest.mark.parametrize("stream", [False, True])
def test_langchain_tool_loop(chain, stream):
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = chain.bind_tools([TOOL])

    def turn(messages):
        if not stream:
            return bound.invoke(messages)
        whole = None
        for chunk in bound.stream(messages):
            whole = chunk if whole is None else whole + chunk
        return whole

    ask = HumanMessage("how is the weather?")
    first = turn([ask])
    assert [call["args"] for call in first.tool_calls] == [{"city": "Rome €"}] * 2
    results = [ToolMessage(RESULT, tool_call_id=call["id"]) for call in first.tool_calls]
    assert turn([ask, first, *results]).content == VERDICT


def test_langchain_json_schema_and_logprobs(chain):
    structured = chain.with_structured_output(Place, method="json_schema")
    assert structured.invoke("hi") == Place(city="Rome")
    scored = chain.bind(logprobs=True, top_logprobs=1).invoke("hi")
    entries = scored.response_metadata["logprobs"]["content"]
    assert entries[1]["logprob"] == -1 / 8


def test_langchain_errors_and_leaving(chain, served):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chain.bind(temperature=-1).invoke("hi")
    stream = chain.stream(ENDLESS)
    next(stream)
    stream.close()
    wait_running(served[0])


# The openai package of Node.


def test_node_sdk_runs_its_suite(served):
    engine, url = served
    folder = os.environ.get("FLARE_NODE_MODULES", "")
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    if not (Path(folder) / "openai").is_dir():
        pytest.skip("FLARE_NODE_MODULES names no node_modules folder with openai in it")
    script = Path(__file__).with_name("openai_suite.cjs")
    words = {"ENDLESS": ENDLESS, "RESULT": RESULT, "VERDICT": VERDICT, "GREETING": GREETING}
    found = subprocess.run(
        ["node", str(script), url, json.dumps({**words, "TOOL": TOOL, "FORMAT": FORMAT})],
        env={**os.environ, "NODE_PATH": folder},
        capture_output=True,
        text=True,
        timeout=NODE_LIMIT_S,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    passed = ["chat", "stream", "tool loop", "schema", "logprobs", "errors", "leaving"]
    assert found.stdout.split("\n")[:-1] == passed
    wait_running(engine)
