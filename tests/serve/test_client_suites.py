"""One scripted suite through every client library, over a real socket: chat, stream, a cut answer,
a full tool loop, a JSON schema, log-probabilities, errors, and leaving early (contract: A3).

It runs over a scripted engine, which says what is expected to the letter, and (slow) over the demo
checkpoint served in one process. What a library makes of an answer is compared with what a plain
request gets. litellm and langchain-openai come with the `clients` extra, the openai package of Node
by npm (or from the folder that FLARE_NODE_MODULES names); what is absent is skipped by name.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator

import jsonschema
import msgspec
import pytest

from tests.serve.processes import gauge
from tests.support.client_drivers import (
    CITY_SCHEMA,
    ENDLESS,
    LONG_SCHEMA,
    Anthropic,
    Driver,
    Http,
    LangChain,
    LiteLlm,
    OpenAiChat,
    OpenAiResponses,
    Question,
    Refused,
)
from tests.support.client_script import DOCUMENT, GREETING, VERDICT, client_script
from tests.support.described import DescribedApp, assert_described
from tests.support.http_server import chat_codec, http_server, wait_running
from tests.support.node_driver import Absent, OpenAiNode, node_modules

pytestmark = pytest.mark.timeout(400)

DRIVERS = {
    "openai": OpenAiChat,
    "openai-responses": OpenAiResponses,
    "anthropic": Anthropic,
    "litellm": LiteLlm,
    "langchain-openai": LangChain,
    "openai-node": OpenAiNode,
}
NODE = pytest.param("openai-node", marks=pytest.mark.slow)
CLIENTS = [NODE if name == "openai-node" else name for name in DRIVERS]
CITIES = "What is the weather in Rome and in Paris?"
SCORE_TOLERANCE = 1e-3
"""A prefix from the cache and one computed anew differ in their last bits."""
FREE_LIMIT_S = 15.0
CONTEXT_TOKENS = 8192
LONG_TOKENS = 3000


@dataclasses.dataclass(frozen=True)
class Served:
    """A server under test.

    Attributes:
        wait_running: waits until so many requests run.
        known: what the scripted engine says, by part; empty for a model.
    """

    url: str
    model: str
    wait_running: Callable[[int], None]
    known: dict[str, str]

    def question(self, user: str = "Write a python function that adds numbers.", **fields):
        return Question(user=user, model=self.model, **fields)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory, free_port) -> Iterator[Served]:
    codec = chat_codec(tmp_path_factory.mktemp("checkpoint"))
    apps: list[DescribedApp] = []

    def kept(app):
        apps.append(DescribedApp(app))
        return apps[-1]

    with http_server(codec, free_port(), client_script, wrap=kept) as (engine, url):
        engine.engine_info = msgspec.structs.replace(
            engine.engine_info, context_tokens=CONTEXT_TOKENS, max_prompt_tokens=CONTEXT_TOKENS - 1
        )

        def wait(count: int) -> None:
            if count:
                assert len(engine.running) == count
            else:
                wait_running(engine)

        known = {"chat": GREETING, "verdict": VERDICT, "schema": DOCUMENT}
        yield Served(url, "tiny", wait, known)
    # What the libraries sent and was accepted is what the OpenAPI document describes.
    assert apps[0].accepted
    for path, body in apps[0].accepted:
        assert_described(path, body)


@pytest.fixture(scope="module")
def demo(demo_url) -> Served:
    def wait(count: int) -> None:
        deadline = time.monotonic() + FREE_LIMIT_S
        while gauge(demo_url, "flare_num_requests_running") != count:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    return Served(demo_url, "glm-demo", wait, {})


@pytest.fixture(params=["scripted", pytest.param("demo", marks=pytest.mark.slow)], scope="module")
def served(request) -> Served:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def modules(tmp_path_factory):
    try:
        return node_modules(tmp_path_factory.mktemp("node"))
    except Absent as reason:
        pytest.skip(str(reason))


@pytest.fixture(params=CLIENTS)
def driver(request, served) -> Iterator[Driver]:
    kind = DRIVERS[request.param]
    if kind is OpenAiNode:
        made = kind(served.url, request.getfixturevalue("modules"))
    else:
        try:
            made = kind(served.url)
        except ImportError as error:
            pytest.skip(f"{error.name} is not installed (extra: clients)")
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(served) -> Iterator[Http]:
    plain = Http(served.url)
    yield plain
    plain.close()


def lacking(driver: Driver, part: str) -> None:
    if part in driver.lacks:
        pytest.skip(driver.lacks[part])


@pytest.mark.parametrize("stream", [False, True])
def test_chat(served, driver, reference, stream):
    question = served.question()
    expected, got = reference.ask(question), driver.ask(question, stream=stream)
    assert got.text == expected.text == served.known.get("chat", expected.text)
    assert got.finish == expected.finish == "stop"
    assert not got.calls
    assert (got.pieces > 1) == stream
    if not stream:
        assert got.tokens == expected.tokens


@pytest.mark.parametrize("stream", [False, True])
def test_answer_cut_at_its_limit(served, driver, reference, stream):
    question = served.question(max_tokens=6)
    got = driver.ask(question, stream=stream)
    assert got.finish == "length"
    assert got.text == reference.ask(question).text


@pytest.mark.parametrize("stream", [False, True])
def test_full_tool_loop(served, driver, reference, stream):
    question = served.question(CITIES, tools=True)
    first, expected = driver.ask(question, stream=stream), reference.ask(question)
    assert first.finish == "calls"
    assert len(first.calls) == 2
    assert len({call.id for call in first.calls}) == 2
    arguments = [json.loads(call.arguments) for call in first.calls]
    assert arguments == [json.loads(call.arguments) for call in expected.calls]
    assert all(call.name == "get_weather" for call in first.calls)
    again = dataclasses.replace(question, calls=first.calls)
    last = driver.ask(again, stream=stream)
    assert last.finish == "stop"
    assert last.text == reference.ask(again).text == served.known.get("verdict", last.text)
    assert "sunny" in last.text


@pytest.mark.parametrize("stream", [False, True])
def test_json_schema(served, driver, stream):
    question = served.question("Add 2 and 3.", schema=CITY_SCHEMA)
    got = driver.ask(question, stream=stream)
    jsonschema.validate(json.loads(got.text), CITY_SCHEMA)
    assert got.finish == "stop"
    assert got.text == served.known.get("schema", got.text)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(served, driver, reference, stream):
    lacking(driver, "scores")
    question = served.question(max_tokens=40, scored=True)
    expected = reference.ask(question).scores
    got = driver.ask(question, stream=stream).scores
    assert len(got) > 5
    if not isinstance(driver, OpenAiResponses):
        assert len(got) == len(expected)
    # The Responses API tells those of the message alone: the last ones.
    assert got == pytest.approx(expected[-len(got) :], abs=SCORE_TOLERANCE)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"temperature": -1.0}, 400, "temperature"),
        ({"model": "other"}, 404, "other"),
        ({"max_tokens": 10**6}, 400, "context"),
    ],
)
def test_errors(served, driver, fields, status, words, stream):
    question = dataclasses.replace(served.question(), **fields)
    with pytest.raises(Refused) as refused:
        driver.ask(question, stream=stream)
    assert refused.value.status == status
    assert words in refused.value.message


def test_leaving_ends_the_request(served, driver):
    question = served.question(ENDLESS, schema=LONG_SCHEMA, max_tokens=LONG_TOKENS)
    started = time.monotonic()
    driver.leave(question, lambda: served.wait_running(1))
    served.wait_running(0)
    assert time.monotonic() - started < FREE_LIMIT_S
