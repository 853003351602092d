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
