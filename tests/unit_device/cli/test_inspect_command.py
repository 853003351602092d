"""`flare-ray inspect`: exit status and where its findings go."""

import sys

import pytest

from flare_ray.cli.main import main
from tests.support.scripted.geometry import Script, write_checkpoint
from tests.support.scripted.recipe import DOTTED


def inspect(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["flare-ray", "inspect", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_problems_are_printed_and_end_with_status_one(monkeypatch, capsys, tmp_path):
    status, out, err = inspect(monkeypatch, capsys, str(tmp_path / "absent"))
    assert (status, err) == (1, "") and "absent" in out and "problem" in out


def test_recipe_option_is_taken_and_unknown_names_are_a_problem(monkeypatch, capsys, tmp_path):
    folder = write_checkpoint(tmp_path / "c", Script(vocab_size=32))
    status, out, _ = inspect(monkeypatch, capsys, str(folder), "--recipe", "absent")
    assert status == 1 and "'absent'" in out
    _, out, _ = inspect(monkeypatch, capsys, str(folder), "--recipe", DOTTED)
    assert ": scripted" in out.splitlines()[0]
