"""`flare-ray plan` on a scripted checkpoint: text, JSON, fit, refusals."""

import json
import sys

import msgspec
import pytest

from flare_ray.cli.main import main
from flare_ray.contracts.manifest import PreparedManifest
from tests.support.scripted.geometry import Script, write_checkpoint
from tests.support.scripted.recipe import DOTTED

CPU = ("--recipe", DOTTED, "--device", "cpu", "--context-tokens", "256")


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    folder = write_checkpoint(tmp_path / "c", Script(vocab_size=32))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flare-ray", "plan", str(folder), *CPU, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def test_concurrency_four_with_five_drafts_is_eighteen_graphs_and_as_many_masked(plan):
    status, out, _ = plan("--mtp-draft-tokens", "5")
    assert status == 0 and "speculative, absorbs drafter history: 36" in out
    assert "fits: " in out


def test_captured_plan_tells_graphs_and_the_bytes_of_their_pool(plan):
    arguments = ("--device", "cuda", "--dtype", "bfloat16", "--memory-gib", "8")
    status, out, _ = plan(*arguments)
    assert status == 0 and "captured as " in out
    assert plan(*arguments, "--eager")[1].count("captured") == 0
    status, _, err = plan(*arguments[:-1], "0.01")
    assert status == 2 and "graph pool" in err and "change" in err


def test_json_is_the_manifest_and_nothing_else(plan):
    status, out, err = plan("--json", "--concurrency", "2")
    manifest = msgspec.convert(json.loads(out), PreparedManifest)
    assert status == 0 and manifest.slots == 2 and manifest.recipe == "scripted"
    assert err.startswith("fits: ")


def test_options_change_the_plan(plan):
    _, out, _ = plan("--no-mtp", "--json")
    manifest = msgspec.convert(json.loads(out), PreparedManifest)
    assert not manifest.speculation and manifest.draft_tokens == 0
    _, out, _ = plan("--widths", "1,4", "--json")
    manifest = msgspec.convert(json.loads(out), PreparedManifest)
    assert {shape.verify_width for shape in manifest.shapes if shape.draft_tokens} == {4}


def test_plan_that_does_not_fit_ends_with_status_two_after_the_plan(plan):
    status, out, err = plan("--memory-gib", "0.001", "--concurrency", "256")
    assert status == 2 and "bytes per rank" in out
    assert err.startswith("error: ") and "0.001" in err


def test_more_drafts_than_the_recipe_has_are_refused(plan):
    status, _, err = plan("--fixed-width", "8")
    assert status == 2 and "prepare it" in err
