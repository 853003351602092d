"""Names that users of other engines know: taken as the same setting, or refused with what to do."""

import dataclasses
import sys

import pytest
from typer.testing import CliRunner

from flare_ray.cli import main as commands
from flare_ray.cli import serve
from flare_ray.cli.config_check import check_document, read_document
from flare_ray.cli.knobs import ALIASES, REFUSED
from flare_ray.cli.options import SETTINGS
from flare_ray.errors import ConfigError
from tests.rules.sources import ROOT

DEMO = ROOT / "deployments" / "glm-demo.yaml"
PAGE = ROOT / "docs" / "operators" / "from-other-engines.md"
VALUES = {
    "context_tokens": "2048",
    "concurrency": "2",
    "prefill_tokens": "256",
    "kv_dtype": "float32",
    "page_pool_tokens": "8192",
    "tensor_parallel_size": "2",
}
FLAGS = [(option, name) for option, names in ALIASES.items() for name in names]


def given_to_serve(monkeypatch, arguments):
    """What the command understood."""
    seen = []
    monkeypatch.setattr(
        serve, "serve_file", lambda file, options, http: seen.append((options, http)) or 0
    )
    monkeypatch.setattr(sys, "argv", ["flare-ray", "serve", str(DEMO), *arguments])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert not ended.value.code
    return seen[0]


@pytest.mark.parametrize(("option", "flag"), FLAGS)
def test_second_name_sets_the_same(monkeypatch, option, flag):
    on, _, off = flag.partition("/")
    if off:
        own = f"--{option.replace('_', '-')}"
        pairs = [([on], [own]), ([off], [f"--no-{option.replace('_', '-')}"])]
    else:
        value = VALUES[option]
        pairs = [([on, value], [f"--{option.replace('_', '-')}", value])]
    for foreign, ours in pairs:
        options = [given_to_serve(monkeypatch, arguments)[0] for arguments in (foreign, ours)]
        assert dataclasses.asdict(options[0]) == dataclasses.asdict(options[1])
        assert getattr(options[0], option) is not None


def test_served_model_name_and_keys_replace_the_files(monkeypatch, tmp_path):
    keys = tmp_path / "keys.yaml"
    arguments = ["--served-model-name", "mine", "--keys-file", str(keys)]
    _, http = given_to_serve(monkeypatch, arguments)
    document = read_document(DEMO)
    http.write_into(document["applications"][0]["args"])
    config = check_document(document, name="f").configs["flare"]
    assert config.model_name == "mine"
    assert config.ingress.keys_file == str(keys)


@pytest.mark.parametrize("inline", [False, True])
def test_chat_template_replaces_the_files(monkeypatch, tmp_path, inline):
    monkeypatch.chdir(tmp_path)
    value = "{{ messages[0].content }}" if inline else "mine.jinja"
    _, http = given_to_serve(monkeypatch, ["--chat-template", value, "--keys-file", "k.yaml"])
    document = read_document(DEMO)
    http.write_into(document["applications"][0]["args"])
    ingress = check_document(document, name="f").configs["flare"].ingress
    assert ingress.chat_template == (value if inline else str(tmp_path / value))
    assert ingress.keys_file == str(tmp_path / "k.yaml")


@pytest.mark.parametrize("command", ["serve", "debug-serve", "plan"])
@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_absent_option_is_refused_by_name(monkeypatch, capsys, command, flag):
    monkeypatch.setattr(sys, "argv", ["flare-ray", command, str(DEMO), f"{flag}=1"])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {flag}: {REFUSED[flag]}\n"


def test_refused_options_are_no_options_of_ours():
    told = CliRunner().invoke(commands.app, ["serve", "--help"]).output
    taken = {word.strip(",/ ") for word in told.replace("/", " ").split() if word.startswith("--")}
    assert not taken & set(REFUSED)
    assert {"--max-model-len", "--served-model-name", "--chat-template"} <= taken


def test_foreign_key_in_a_file_is_answered_with_ours():
    document = read_document(DEMO)
    document["applications"][0]["args"]["engine"]["max_model_len"] = 5
    with pytest.raises(
        ConfigError, match=r"max_model_len: unknown key; here it is engine\.context"
    ):
        check_document(document, name="f")


def test_page_lists_every_name_once():
    text = PAGE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `--")]
    for option, names in ALIASES.items():
        for name in names:
            shown = name.partition("/")[0]
            (row,) = [row for row in rows if row.startswith(f"| `{shown}`")]
            assert f"`engine.{SETTINGS[option]}`" in row
    for flag, setting in (("served-model-name", "model_name"), ("chat-template", "ingress.chat")):
        (row,) = [row for row in rows if row.startswith(f"| `--{flag}`")]
        assert f"the same, setting `{setting}" in row
    for flag, answer in REFUSED.items():
        (row,) = [row for row in rows if row.startswith(f"| `{flag}`")]
        assert row == f"| `{flag}` | refused: {answer} |"
