"""The command as a user meets it: help, start-up cost, messages, exit status."""

import subprocess
import sys
import time

import pytest

from flare_ray import __version__
from flare_ray.cli import main as commands
from flare_ray.cli.options import EngineOptions, option_names
from flare_ray.errors import CheckpointError, ContractViolation, InvalidRequest
from flare_ray.recipes import registry

HELP_LIMIT_S = 1.5
HEAVY = ("torch", "ray", "transformers", "tokenizers", "fastapi")
ENGINE_COMMANDS = ("plan", "serve", "debug-serve")


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of `flare-ray ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["flare-ray", *arguments])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def run_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_help_is_quick():
    # The better of two: a loaded machine may stall one process.
    times = []
    for _ in range(2):
        started = time.monotonic()
        run_process(
            "import sys; sys.argv[1:] = ['--help']; from flare_ray.cli.main import app\n"
            "app(standalone_mode=False)"
        )
        times.append(time.monotonic() - started)
    assert min(times) < HELP_LIMIT_S


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["plan", "--help"]])
def test_help_loads_no_heavy_library(arguments):
    code = f"""
import sys
sys.argv[1:] = {arguments!r}
from flare_ray.cli.main import app
app(standalone_mode=False)
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert run_process(code).splitlines()[-1] == "[]"


def test_help_lists_every_command(monkeypatch, capsys):
    status, out, _ = run(monkeypatch, capsys, "--help")
    assert status == 0
    for name in ("inspect", "plan", "check", "serve", "debug-serve", "chat"):
        assert f"  {name} " in out


@pytest.mark.parametrize("command", ENGINE_COMMANDS)
def test_help_names_each_recipes_default_and_maximum_draft_count(monkeypatch, capsys, command):
    _, out, _ = run(monkeypatch, capsys, command, "--help")
    text = " ".join(out.split())
    for recipe in registry.recipes():
        counts = recipe.speculation
        expected = (
            f"{recipe.name}: {counts.default_draft_tokens} by default, "
            f"at most {counts.max_draft_tokens}."
        )
        assert expected in text


@pytest.mark.parametrize("command", ENGINE_COMMANDS)
def test_engine_commands_take_the_same_options(monkeypatch, capsys, command):
    _, out, _ = run(monkeypatch, capsys, command, "--help")
    for name in option_names():
        assert f"--{name.replace('_', '-')}" in out
    for switch in ("--no-mtp-adaptive-verification", "--no-history-drafts", "--no-eager"):
        assert switch in out


def test_options_reach_the_command_as_they_were_typed(monkeypatch):
    seen: list[EngineOptions] = []
    monkeypatch.setattr(commands.Plan, "run", lambda self: seen.append(self) or 0)
    arguments = (
        "plan x --mtp-draft-tokens 3 --no-mtp-adaptive-verification --widths 1,2,4 "
        "--concurrency 2 --history-drafts --tensor-parallel-size 2 --threads 2 --json"
    )
    commands.app(arguments.split(), standalone_mode=False)
    [plan] = seen
    assert (plan.mtp_draft_tokens, plan.mtp_adaptive_verification) == (3, False)
    assert (plan.widths, plan.concurrency, plan.history_drafts) == ((1, 2, 4), 2, True)
    assert (plan.tensor_parallel_size, plan.threads, plan.json) == (2, 2, True)
    assert plan.fixed_width is None and not plan.no_mtp and str(plan.source) == "x"


def test_version_is_printed(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "--version") == (0, f"flare-ray {__version__}\n", "")


@pytest.mark.parametrize("status", [0, 1])
def test_exit_status_is_the_commands(monkeypatch, capsys, status):
    monkeypatch.setattr(commands.Check, "run", lambda self: status)
    assert run(monkeypatch, capsys, "check", "f")[0] == status


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("tensors differ", ("missing a", "extra b")),
        InvalidRequest("wrong"),
    ],
)
def test_what_the_user_can_mend_is_one_message_without_traceback(monkeypatch, capsys, error):
    def fail(self):
        raise error

    monkeypatch.setattr(commands.Check, "run", fail)
    assert run(monkeypatch, capsys, "check", "f") == (2, "", f"error: {error}\n")


def test_fault_of_our_own_keeps_its_traceback(monkeypatch):
    def fail(self):
        raise ContractViolation("a + 1 tokens expected")

    monkeypatch.setattr(commands.Check, "run", fail)
    monkeypatch.setattr(sys, "argv", ["flare-ray", "check", "f"])
    with pytest.raises(ContractViolation):
        commands.main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "FILE|CHECKPOINT"),
        (["plan", "x", "--concurrency", "many"], "--concurrency"),
        (["plan", "x", "--widths", "1;2"], "such as 1,2,4"),
        (["plan", "x", "--no-such-option"], "--no-such-option"),
        (["absent"], "absent"),
        (["plan", "x", "--no-mtp", "--mtp-only"], "exclude each other"),
        (["plan", "x", "--concurrency", "0"], "error: --concurrency: "),
        (["plan", "x", "--history-drafts", "--no-mtp"], "--history-drafts needs them"),
    ],
)
def test_wrong_command_line_is_refused_by_name(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    status, out, err = run(monkeypatch, capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err and "Traceback" not in err


def test_source_that_does_not_exist_is_named(monkeypatch, capsys, tmp_path):
    status, _, err = run(monkeypatch, capsys, "plan", str(tmp_path / "absent"))
    assert status == 2 and "absent" in err


def test_chat_without_a_server_says_what_to_do(monkeypatch, capsys, free_port):
    url = f"http://127.0.0.1:{free_port()}"
    status, _, err = run(monkeypatch, capsys, "chat", "--url", url)
    assert status == 2 and err.startswith(f"error: no server answers at {url}")
