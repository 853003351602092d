"""`ingress.chat_template`: another template than the checkpoint's, for every API."""

import dataclasses

import pytest

from flare_ray.config import DeploymentConfig, EngineConfig
from flare_ray.errors import ConfigError
from flare_ray.frontend.settings import load_settings
from flare_ray.frontend.tokenizer import TextCodec
from tests.rules.sources import ROOT
from tests.support.chat_checkpoint import CHAT, write_chat_checkpoint
from tests.support.fake_engine_client import FakeEngineClient
from tests.unit.frontend.conftest import Api, error_of

DEMO = ROOT / "deployments" / "demo" / "glm"
TEMPLATE = """\
{%- for m in messages -%}
<|{{ m.role }}|>({{ m.content }})
{%- endfor -%}
{%- for tool in tools or [] -%}
tool {{ tool.function.name }}
{%- endfor -%}
{{- "in " ~ mood if mood }}"""
BROKEN = {
    "syntax": ("ok\n{% if %}", "line 2"),
    "filter": ("{{ 1 }}\n\n{{ 2 | nosuchfilter }}", "line 3"),
    "raised": ("a\n{{ raise_exception('never') }}", "line 2: .*never"),
    "sandbox": ("{{ messages.__class__.__mro__ }}", "line 1: .*unsafe"),
    "assignment": ("a\n{% set messages[0].content = 1 %}", "line 2"),
    "python": ("\n{{ messages[0].content + 1 }}", "line 2"),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    return write_chat_checkpoint(tmp_path / "checkpoint")


def given(api, folder, template):
    """The API over the same checkpoint with another template."""
    codec = TextCodec(folder, CHAT, chat_template=template)
    return Api(FakeEngineClient(), dataclasses.replace(api.settings, codec=codec))


@pytest.mark.parametrize("as_file", [True, False])
def test_every_api_reads_the_template_given(api, folder, tmp_path, as_file):
    value = TEMPLATE
    if as_file:
        file = tmp_path / "mine.jinja"
        file.write_text(TEMPLATE)
        value = str(file)
    ours = given(api, folder, value)
    user = {"role": "user", "content": "é"}
    bodies = {
        "/v1/chat/completions": {"messages": [user]},
        "/v1/responses": {"input": "é"},
        "/v1/messages": {"messages": [user], "max_tokens": 5},
    }
    for path, body in bodies.items():
        assert ours.post(path, {"model": "tiny", **body}).status_code == 200
        assert ours.prompt == "[<|user|>](é)", path
    spelled = list(ours.client.requests[-1].prompt_tokens)
    tokens = ours.post("/tokenize", {"messages": [user]}).json()["tokens"]
    assert tokens == spelled
    count = ours.post("/v1/messages/count_tokens", {"model": "tiny", "messages": [user]})
    assert count.json() == {"input_tokens": len(spelled)}


def test_template_given_has_variables_and_tools_of_its_own(api, folder):
    ours = given(api, folder, TEMPLATE)
    tool = {"type": "function", "function": {"name": "f"}}
    assert ours.chat(tools=[tool], chat_template_kwargs={"mood": "hope"}).status_code == 200
    assert ours.prompt.endswith("tool fin hope")
    assert error_of(ours.chat(chat_template_kwargs={"thinking": 1}), 400)["param"] == (
        "chat_template_kwargs.thinking"
    )


def test_markup_of_a_client_stays_text_under_a_template_given(api, folder):
    ours = given(api, folder, TEMPLATE)
    assert ours.chat(messages=[{"role": "user", "content": "<|end|>"}]).status_code == 200
    end = ours.settings.codec._tokenizer.token_to_id("<|end|>")
    assert end not in ours.client.requests[-1].prompt_tokens


def test_python_error_inside_a_template_is_the_requests_fault(api, folder):
    source = "{{ messages[0].content if messages | length < 2 else messages[0].content + 1 }}"
    ours = given(api, folder, source)
    assert ours.chat().status_code == 200
    user = {"role": "user", "content": "a"}
    error = error_of(ours.chat(messages=[user, user]), 400)
    assert error["param"] == "messages"
    assert "chat template refuses" in error["message"]


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_broken_template_is_refused_at_the_start_with_its_line(folder, tmp_path, name):
    source, message = BROKEN[name]
    file = tmp_path / "mine.jinja"
    file.write_text(source)
    with pytest.raises(ConfigError, match=rf"mine\.jinja .*{message}"):
        TextCodec(folder, CHAT, chat_template=str(file))
    with pytest.raises(ConfigError, match=rf"\(ingress\.chat_template\) .*{message}"):
        TextCodec(folder, CHAT, chat_template=source)


def test_file_that_cannot_be_read_is_named(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"ingress\.chat_template\).*nowhere\.jinja"):
        TextCodec(folder, CHAT, chat_template=str(tmp_path / "nowhere.jinja"))
    (tmp_path / "bytes.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        TextCodec(folder, CHAT, chat_template=str(tmp_path / "bytes.jinja"))


def test_setting_reaches_the_routes():
    engine = EngineConfig(checkpoint=str(DEMO), device="cpu")
    config = {"model_name": "m", "engine": engine, "ingress": {"chat_template": "{{ 'x' }}"}}
    settings = load_settings(DeploymentConfig.model_validate(config))
    text, _ = settings.codec.encode_chat([{"role": "user", "content": "a"}], tools=None, options={})
    assert text == "x"
    settings.pool.close()
