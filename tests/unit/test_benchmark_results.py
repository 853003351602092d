"""The result file: verdicts are computed once, and a file that contradicts itself is refused."""

import json
import socket
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
from rich.console import Console

from benchmarks import summary
from benchmarks.support import results
from benchmarks.support.results import (
    MAX_RESULT_BYTES,
    Bound,
    describe_machine,
    metric_at,
    print_result,
    read_result,
    running_command,
    write_result,
)

METRICS = {"speedup": 8.0, "ratio": {"b1": 1.9, "b4": 0.99}, "note": "two threads"}


def write(folder, *bounds, name="first", metrics=METRICS):
    return write_result(name, metrics, bounds, command=["python", "-m", "b"], folder=folder)


@pytest.fixture
def console():
    return Console(width=200, record=True, color_system=None)


@pytest.mark.parametrize(
    ("operator", "value", "met"),
    [
        *((">=", 8.0, True), (">=", 8.1, False), (">", 8.0, False), (">", 7.9, True)),
        *(("<=", 8.0, True), ("<=", 7.9, False), ("<", 8.0, False), ("<", 8.1, True)),
        *(("==", 8.0, True), ("==", 8.1, False)),
    ],
)
def test_writer_computes_verdict_at_the_bound(tmp_path, operator, value, met):
    result = write(tmp_path, Bound(metric="speedup", operator=operator, value=value))
    assert [target.met for target in result.targets] == [met]


def test_written_file_reads_back_equal(tmp_path):
    result = write(tmp_path, Bound(metric="ratio.b1", operator=">=", value=1.8))
    assert read_result(tmp_path / "first.json") == result


def test_result_records_versions_commit_and_command(tmp_path):
    result = write(tmp_path)
    assert result.command == "python -m b"
    assert {"python", "torch", "ray"} <= result.versions.keys()
    assert len(result.commit.removesuffix("-dirty")) == 40 or "not a git" in result.commit


def test_machine_description_names_no_host():
    machine = describe_machine()
    assert machine.cores >= 1 and machine.cpu
    assert socket.gethostname() not in machine.model_dump_json()


@pytest.mark.parametrize("metric", ["absent", "ratio.absent", "ratio", "note", "speedup.deeper"])
def test_bound_on_something_not_a_number_is_refused_and_nothing_written(tmp_path, metric):
    with pytest.raises(ValueError, match=metric):
        write(tmp_path, Bound(metric=metric, operator=">=", value=1.0))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True])
def test_metric_that_is_not_a_finite_number_is_refused(value):
    with pytest.raises(ValueError, match="finite number"):
        metric_at({"x": value}, "x")


def test_not_a_number_without_a_target_is_refused_and_nothing_written(tmp_path):
    with pytest.raises(ValueError):
        write(tmp_path, metrics={"x": float("nan")})
    assert not list(tmp_path.iterdir())


def test_result_larger_than_the_limit_is_refused(tmp_path):
    with pytest.raises(ValueError, match=str(MAX_RESULT_BYTES)):
        write(tmp_path, metrics={"trace": "x" * MAX_RESULT_BYTES})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["targets"][0].update(met=True), "run it again"),
        (lambda d: d["metrics"].update(speedup=100.0), "run it again"),
        (lambda d: d.update(host="a"), "host"),
        (lambda d: d.pop("commit"), "commit"),
        (lambda d: d.update(name="other"), "other"),
    ],
)
def test_edited_file_is_refused(tmp_path, edit, message):
    write(tmp_path, Bound(metric="speedup", operator=">=", value=9.0))
    path = tmp_path / "first.json"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message):
        read_result(path)


@pytest.mark.parametrize("module", ["benchmarks.x", "benchmarks.x.__main__"])
def test_running_command_names_the_module_and_its_arguments(monkeypatch, module):
    main = types.ModuleType("__main__")
    main.__spec__ = ModuleSpec(module, None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["/somewhere/x.py", "--slots", "4"])
    assert running_command() == ["python", "-m", "benchmarks.x", "--slots", "4"]


def test_print_result_shows_numbers_and_targets(tmp_path, console):
    print_result(write(tmp_path, Bound(metric="ratio.b4", operator=">=", value=1.0)), console)
    text = console.export_text()
    assert "speedup" in text and "ratio.b4" in text and "MISSED" in text


@pytest.mark.parametrize(("bound", "status"), [(8.0, 0), (8.1, 1)])
def test_an_official_run_is_written_and_fails_on_a_missed_target(
    tmp_path, monkeypatch, console, bound, status
):
    monkeypatch.setattr(
        results,
        "write_result",
        lambda name, metrics, bounds: write(tmp_path, *bounds, name=name, metrics=metrics),
    )
    bounds = (Bound(metric="speedup", operator=">=", value=bound),)
    assert results.conclude("first", METRICS, bounds, console, official=True) == status
    assert read_result(tmp_path / "first.json").metrics == METRICS


def test_an_unofficial_run_shows_every_metric_and_writes_nothing(monkeypatch, console):
    monkeypatch.delattr(results, "write_result")
    bounds = (Bound(metric="speedup", operator=">=", value=9.0),)
    assert results.conclude("first", METRICS, bounds, console, official=False) == 0
    text = console.export_text()
    assert all(f"{name}: {value}" in text for name, value in METRICS.items())
    assert "no result was written" in text


def test_summary_lists_every_target_and_fails_on_a_missed_one(tmp_path, console):
    write(tmp_path, Bound(metric="speedup", operator=">=", value=8.0))
    assert summary.summarise(tmp_path, console) == 0
    write(tmp_path, Bound(metric="ratio.b4", operator=">=", value=1.0), name="second")
    assert summary.summarise(tmp_path, console) == 1
    text = console.export_text()
    assert "1 of 2 targets met in 2 result files" in text and "0.99" in text


def test_summary_fails_on_a_file_that_is_no_result(tmp_path, console):
    (tmp_path / "odd.json").write_text("{}")
    assert summary.summarise(tmp_path, console) == 1
    assert "odd.json" in console.export_text()


def test_summary_of_an_empty_folder_says_so(tmp_path, console):
    assert summary.summarise(tmp_path, console) == 0
    assert "No result files" in console.export_text()
