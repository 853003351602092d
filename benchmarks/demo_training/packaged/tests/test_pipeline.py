"""From prompts to a drafter that joins its model, at toy size."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.demo_training.packaged import sample as sampling
from benchmarks.demo_training.packaged import train as training
from benchmarks.demo_training.packaged.finish import finish
from benchmarks.demo_training.packaged.measure import MODES, measure
from benchmarks.demo_training.packaged.model import load_target
from benchmarks.demo_training.packaged.prompts import CATEGORIES, prompts
from benchmarks.demo_training.packaged.rows import Writer, packed, read_texts
from benchmarks.demo_training.packaged.sample import Limits, sample
from benchmarks.demo_training.packaged.train import PROGRESS_FILE, WEIGHTS_FILE, Settings, train
from benchmarks.demo_training.phases import Clock
from flare_ray.config import EngineConfig
from flare_ray.device.prepare import make_plan
from flare_ray.recipes.drafted import join

pytestmark = pytest.mark.slow

DRAFTED = 64
LIMITS = Limits(seconds=16, requests=8, prompt=400, answer=24)
SETTINGS = Settings(seconds=60, rows=2, length=640, depth=3, vocabulary=DRAFTED, save=0.0)


class Ticking(Clock):
    """A second passes whenever somebody looks, however busy the machine is."""

    ticks = 0

    def elapsed(self) -> float:
        self.ticks += 1
        return float(self.ticks)


@pytest.fixture(scope="module", autouse=True)
def ticking():
    with pytest.MonkeyPatch.context() as patch:
        for module in (sampling, training):
            patch.setattr(module, "Clock", Ticking)
        patch.setattr(training, "HELD_OUT", 8)
        yield


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory, ticking):
    """A run's folder behind sampling and training."""
    out = tmp_path_factory.mktemp("run")
    sample(folder, out, LIMITS)
    train(folder, out, out, SETTINGS, None)
    return out


def test_prompts_are_seeded_and_of_every_kind():
    source, again, other = prompts("a"), prompts("a"), prompts("b")
    found = [next(source) for _ in range(400)]
    assert found == [next(again) for _ in range(400)] != [next(other) for _ in range(400)]
    assert {category for category, _ in found} == set(CATEGORIES)
    for _, text in found:
        assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
        assert not any(field in text for field in ("{a}", "{b}", "{task}", "{language}"))


def test_what_was_written_is_on_disk_at_once_and_in_small_files(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.demo_training.packaged.rows.FILE_BYTES", 1000)
    writer = Writer(tmp_path)
    for n in range(4):
        writer.add([[n] * 300, [n] * 20], [200, 5])
        assert len(read_texts(tmp_path).ids) == 2 * n + 2
    Writer(tmp_path).add([[9, 9]], [1])
    texts = read_texts(tmp_path)
    assert [len(ids) for ids in texts.ids] == [300, 20] * 4 + [2]
    assert texts.given == [200, 5] * 4 + [1] and texts.ids[-1].tolist() == [9, 9]
    assert len(list(tmp_path.glob("sampled-*.npz"))) > 2


def test_rows_begin_with_whole_conversations(tmp_path):
    writer = Writer(tmp_path)
    writer.add([[1, 1, 2, 2, 2], [3, 4, 4], [5, 6, 6, 6]], [2, 1, 1])
    ids, own, used = packed(read_texts(tmp_path), [2, 0, 1], 2, 6)
    assert ids.tolist() == [[5, 6, 6, 6, 1, 1], [3, 4, 4, 5, 6, 6]] and used == 4
    assert np.flatnonzero(own[0]).tolist() == [1, 2, 3]
    assert np.flatnonzero(own[1]).tolist() == [1, 2, 4, 5]


def test_sampling_keeps_its_limit_and_ends_answers_at_stops(folder, run):
    report = json.loads((run / "report-sample.json").read_text())
    texts = read_texts(run)
    assert report["conversations"] == len(texts.ids) > LIMITS.requests
    assert report["written"] == texts.written()
    for ids, given in zip(texts.ids, texts.given, strict=True):
        answer = ids[given:].tolist()
        assert 0 < len(answer) <= LIMITS.answer and not {0, 2} & set(answer[:-1])
    # Time that is up in the middle of a chunk ends that chunk.
    model = load_target(folder, torch.device("cpu"), torch.float32)
    limits = Limits(requests=2, prompt=8, answer=4 * sampling.CHECK_STEPS)
    answers = sampling.Sampler(model, limits, []).chunk([[5, 6], [7]], lambda: False)
    assert [len(answer) for answer in answers] == [sampling.CHECK_STEPS] * 2


def test_drawn_tokens_follow_the_models_distribution(folder):
    model = load_target(folder, torch.device("cpu"), torch.float32)
    count = 4000
    sampler = sampling.Sampler(model, Limits(requests=count, prompt=4, answer=1), [])
    found = [row[0] for row in sampler.chunk([[9, 8, 7]] * count, lambda: True)]
    with torch.no_grad():
        logits = model.logits(model.hidden(torch.tensor([[9, 8, 7]]))[0, -1])
    drawn = torch.bincount(torch.tensor(found[0 :: len(sampling.TEMPERATURES)]), minlength=280)
    expected = torch.softmax(logits / sampling.TEMPERATURES[0], -1)
    assert (drawn / drawn.sum() - expected).abs().sum() < 0.35
    assert (torch.softmax(logits, -1) - expected).abs().sum() > 0.35


def test_training_learns_and_goes_on_where_it_was_broken_off(folder, run, tmp_path):
    report = json.loads((run / "report-train.json").read_text())
    first, last = report["curve"][0], report["curve"][-1]
    assert last["loss"] < first["loss"] and report["steps"] > 5
    assert len(report["held_out_overlap"]) == SETTINGS.depth
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / WEIGHTS_FILE).write_bytes((run / WEIGHTS_FILE).read_bytes())
    (broken / PROGRESS_FILE).write_text(json.dumps({"fraction": 0.99}))
    resumed = train(folder, run, tmp_path / "out", SETTINGS, broken)
    assert resumed["begun"] == 0.99 and resumed["steps"] < report["steps"]
    name = "model.layers.3.eh_proj.weight"
    before, after = (load_file(f / WEIGHTS_FILE)[name] for f in (run, tmp_path / "out"))
    assert (before.float() - after.float()).abs().mean() < 0.1 * before.float().abs().mean()


def test_measured_finished_and_joined(folder, run, tmp_path):
    left = measure(folder, run, run, seconds=60.0, count=1, limit=6)
    assert left == []
    result = json.loads((run / "measure-greedy_d3.json").read_text())["result"]
    assert set(result) == {*CATEGORIES, "all"} and result["all"]["prompts"] == len(CATEGORIES)
    assert 1 <= result["all"]["emitted_per_round"] <= 4
    published = tmp_path / "published"
    finish(folder, run, published)
    card = (published / "README.md").read_text()
    assert f"{DRAFTED:,} of" in card and all(f"{MODES[m][2]} drafts" in card for m in MODES)
    whole = tmp_path / "whole"
    whole.mkdir()
    for name in ("config.json", "model.safetensors"):
        (whole / name).write_bytes((folder / name).read_bytes())
    join(whole, published)
    config = EngineConfig(checkpoint=str(whole), device="cpu", dtype="float32", context_tokens=256)
    plan = make_plan(config)
    assert plan.geometry.draft_vocab_size == DRAFTED and plan.manifest.speculation
