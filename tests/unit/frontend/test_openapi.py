"""The OpenAPI document is true: every route, every body's fields, every answer."""

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings

from flare_ray.frontend.api import build_api
from flare_ray.frontend.openai.refused import REFUSED
from flare_ray.frontend.openapi import OPERATIONS, document
from flare_ray.frontend.page.routes import PATH as PAGE_PATH
from flare_ray.frontend.settings import ApiSettings
from tests.support.chat_checkpoint import CHAT
from tests.support.fake_engine_client import FakeEngineClient, answer
from tests.unit.frontend.conftest import MAX_BODY_BYTES

CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
USER = {"role": "user", "content": "hi"}
CHAT_TOOL = {"type": "function", "function": {"name": "weather"}}
BODIES = {
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [USER],
        "tools": [CHAT_TOOL],
        "stop": "x",
        "store": False,
        "max_completion_tokens": 50,
        "n": 2,
    },
    "/v1/completions": {"model": "tiny", "prompt": "a", "best_of": 1, "stop": ["x"]},
    "/v1/responses": {
        "model": "tiny",
        "input": [USER],
        "tools": [{"type": "function", "name": "weather"}],
        "store": False,
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 50,
        "messages": [USER],
        "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
        "thinking": {"type": "adaptive"},
    },
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [USER]},
    "/tokenize": {"prompt": "a", "return_token_strs": True},
    "/v1/tokenize": {"messages": [USER]},
    "/detokenize": {"tokens": [5]},
    "/v1/detokenize": {"tokens": []},
}


@pytest.fixture(scope="module")
def served():
    return document()


def check(served, schema, value):
    """Validate against a schema of the document."""
    full = {"components": served["components"], **schema}
    jsonschema.Draft202012Validator(full).validate(value)


def answer_schema(served, method, path, status):
    operation = served["paths"][path][method.lower()]
    response = operation["responses"]["200" if status == 200 else "default"]
    return response["content"]["application/json"]["schema"]


def test_every_route_is_in_the_document_and_no_other(api, served):
    app = build_api(api.client, api.settings)
    routes = {
        (method, route.path.replace("{model:path}", "{model}"))
        for route in app.routes
        for method in route.methods - {"HEAD"}
        if not f"{route.path}/".startswith(f"{PAGE_PATH}/")  # the page is for people
    }
    refused = {f"/v1/{name}" for name in REFUSED}
    known = {
        (method, path)
        for method, path in routes
        if not any(path == r or path.startswith(f"{r}/{{") for r in refused)
        or (method, path) in OPERATIONS
    }
    assert known == set(OPERATIONS)
    listed = {(m.upper(), path) for path, item in served["paths"].items() for m in item}
    assert listed == set(OPERATIONS)


@pytest.mark.parametrize(
    ("method", "path"), [key for key, operation in OPERATIONS.items() if operation.body]
)
def test_body_has_the_fields_of_its_model(served, method, path):
    operation = OPERATIONS[method, path]
    body = served["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    schema = served["components"]["schemas"][name]
    fields = operation.body.model_fields
    assert set(schema["properties"]) == set(fields) | set(operation.neutral)
    assert set(schema.get("required", ())) == {
        name for name, field in fields.items() if field.is_required()
    }
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("path", sorted(BODIES))
def test_accepted_body_and_its_answer_fit_the_schemas(make_api, served, path):
    api = make_api(answer(f"why</think>so{CALL}"))
    body = BODIES[path]
    request = served["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    check(served, request, body)
    response = api.post(path, body)
    assert response.status_code == 200, response.text
    check(served, answer_schema(served, "POST", path, 200), response.json())
    refused = api.post(path, {**body, "nonsense": 1})
    assert refused.status_code == 400
    check(served, answer_schema(served, "POST", path, 400), refused.json())
    with pytest.raises(jsonschema.ValidationError):
        check(served, request, {**body, "nonsense": 1})


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REFUSALS = {
    "/v1/chat/completions": [
        {"messages": []},
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"messages": [{"content": "hi"}]},
        {"messages": [{"role": "robot", "content": "hi"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
        {"messages": [{"role": "user", "content": "hi", "name": "Ann"}]},
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        {"messages": [USER, {"role": "assistant", "audio": {"id": "x"}}]},
        {"messages": [USER, {"role": "tool", "content": [IMAGE]}]},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
        {"tools": [CHAT_TOOL], "tool_choice": "weather"},
        {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "name": "weather"}},
        {"response_format": {"type": "grammar"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "text", "json_schema": {"name": "n"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"prediction": {"type": "content"}},
        {"stream_options": {"include_usage": "yes"}},
        {"audio": {}},
    ],
    "/v1/completions": [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [""]},
        {"prompt": [1, "a"]},
        {"prompt": [1.5]},
        {"prompt": [[]]},
        {"prompt": {"a": 1}},
        {"prompt": ["a"] * 65},
    ],
    "/v1/responses": [
        {"input": ""},
        {"input": []},
        {"input": ["hi"]},
        {"input": [{"role": "robot", "content": "x"}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"input": [USER, {"type": "reasoning", "summary": [{"text": "x"}]}]},
        {"input": [USER, {"type": "function_call", "call_id": "c", "name": "f"}]},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "web_search"}},
        {"include": ["reasoning.encrypted_content"]},
        {"text": {"verbosity": "low"}},
        {"truncation": "auto"},
        {"store": True},
    ],
    "/v1/messages": [
        {"messages": []},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
        {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use"}]}, USER]},
        {"system": [{"type": "image", "source": {}}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"name": "f"}]},
        {"tool_choice": {"type": "function"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "adaptive", "budget_tokens": 1024}},
        {"output_config": {"format": {"type": "text", "schema": {}}}},
    ],
    "/tokenize": [
        {"prompt": None, "messages": [{"role": "user", "content": [IMAGE]}]},
        {"prompt": None, "messages": [USER], "tools": [{"type": "web_search"}]},
    ],
}
"""What is documented as refused, by route: fields that replace those of BODIES."""
ACCEPTED = {
    "/v1/chat/completions": [
        {"messages": [{"role": "developer", "content": "x"}, USER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "c", "content": []},
            ]
        },
        {"messages": [USER, {"role": "assistant", "content": "", "reasoning": "r"}, USER]},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}, "tools": None},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": True}}},
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]}},
    ],
    "/v1/completions": [
        {"prompt": [1, 2]},
        {"prompt": ["a", [3]]},
        {"prompt": [[1], [2]]},
        {"echo": True, "logprobs": 1},
    ],
    "/v1/responses": [
        {"input": "hi"},
        {"input": [{"type": "message", "role": "user", "content": [], "id": None}, USER]},
        {"input": [USER, {"type": "reasoning", "summary": None, "content": None}, USER]},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"tool_choice": {"type": "function", "name": "weather"}},
    ],
    "/v1/messages": [
        {"system": [{"type": "text", "text": "s"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"thinking": None},
        {"tool_choice": {"type": "tool", "name": "weather"}},
    ],
}


def cases(table):
    """Route and whole body of every entry."""
    return [(path, {**BODIES[path], **fields}) for path, some in table.items() for fields in some]


@pytest.mark.parametrize(("path", "body"), cases(REFUSALS))
def test_documented_refusal_is_refused_by_server_and_schema(make_api, served, path, body):
    assert make_api().post(path, body).status_code == 400
    request = served["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    with pytest.raises(jsonschema.ValidationError):
        check(served, request, body)


@pytest.mark.parametrize(("path", "body"), cases(ACCEPTED))
def test_forms_that_are_taken_fit_the_schema(make_api, path, body):
    """`Api.request` holds every accepted body of this room's tests against the document."""
    response = make_api(answer("why</think>so", step=50)).post(path, body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{model}"])
def test_models_fit_the_schemas(api, served, path):
    response = api.get(path.replace("{model}", "tiny"))
    check(served, answer_schema(served, "GET", path, 200), response.json())


def test_schema_catches_an_answer_of_another_shape(served):
    schema = answer_schema(served, "POST", "/v1/messages", 200)
    with pytest.raises(jsonschema.ValidationError):
        check(served, schema, {"type": "message", "id": 5})


def test_document_is_served_to_everyone(api, served):
    assert api.get("/openapi.json").json() == served
    assert served["openapi"].startswith("3.1")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_schemathesis_finds_no_server_error(codec):
    # Here, since the import takes seconds.
    import schemathesis
    from schemathesis.checks import not_a_server_error

    client = FakeEngineClient(answer(f"why</think>so{CALL}"))
    settings_ = ApiSettings(
        model_name="tiny", codec=codec, chat=CHAT, max_body_bytes=MAX_BODY_BYTES
    )
    schema = schemathesis.openapi.from_asgi("/openapi.json", build_api(client, settings_))
    calls = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def run(case):
            nonlocal calls
            calls += 1
            body = case.body
            if isinstance(body, dict) and isinstance(body.get("model"), str):
                # Otherwise nearly every case would end at the unknown model.
                case.body = {**body, "model": "tiny"}
            case.call_and_validate(checks=[not_a_server_error])

        run()
    assert calls > 100 * len(OPERATIONS) / 2
    assert not client.running
