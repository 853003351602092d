"""The frozen workload: bytes follow from seeds, items are what they say."""

import itertools
import json
import re

import pytest

from benchmarks.support.results import ROOT
from benchmarks.workload.freeze import CHECKPOINTS
from flare_ray.errors import ConfigError
from flare_ray.workload import frozen
from flare_ray.workload.generators.agentic import World, agentic_session, make_world
from flare_ray.workload.items import CATEGORIES, encode_items, sessions_of
from flare_ray.workload.source import (
    build_files,
    import_prompts,
    load_workload,
    tokens_file,
)
from flare_ray.workload.tokens import (
    PAD,
    Encoder,
    encode_tokens,
    synthetic_ids,
    synthetic_items,
    synthetic_tokens,
)

EXTERNAL = ROOT.parent / "shared" / "workload"
FAMILY = re.compile(rb"glm|deep_?seek|qwen", re.IGNORECASE)


@pytest.fixture(scope="module")
def workload():
    return load_workload()


@pytest.fixture(scope="module")
def encoder():
    return Encoder(CHECKPOINTS[0])


def test_committed_items_follow_from_seeds():
    made = build_files((), kept=frozen.FOLDER)
    assert sorted(made) == sorted(path.name for path in frozen.FOLDER.iterdir())
    for name, data in made.items():
        assert data == (frozen.FOLDER / name).read_bytes(), name


def test_committed_ids_follow_from_the_tokeniser(workload, encoder):
    stored = frozen.FOLDER / tokens_file(encoder.name)
    assert stored.is_file(), "another tokeniser: run python -m benchmarks.workload.freeze"
    assert encode_tokens(encoder, [*workload.items, *synthetic_items()]) == stored.read_bytes()


def test_another_seed_gives_other_items(monkeypatch, workload):
    """Negative control of the comparison above."""
    monkeypatch.setattr(frozen, "FIRST_SEED", frozen.FIRST_SEED + 1)
    assert encode_items(frozen.make_items()) != (frozen.FOLDER / frozen.ITEMS).read_bytes()


def test_a_changed_frozen_file_is_refused(tmp_path):
    for path in frozen.FOLDER.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with (tmp_path / frozen.ITEMS).open("ab") as file:
        file.write(b"\n")
    with pytest.raises(ConfigError, match="never edited"):
        load_workload(tmp_path)


def test_every_category_has_items_with_source_and_licence(workload):
    assert {item.category for item in workload.items} == set(CATEGORIES)
    assert {item.source.licence for item in workload.items} == {"Apache-2.0"}
    assert all(item.messages or item.prompt for item in workload.items)


def test_frozen_files_name_no_model_family():
    for path in (*frozen.FOLDER.iterdir(), *(frozen.FOLDER.parents[1] / "texts").iterdir()):
        assert not FAMILY.search(path.read_bytes()), path.name


def test_turns_of_a_session_extend_each_other(workload):
    for session in sessions_of(workload.items):
        assert [item.turn for item in session] == list(range(len(session)))
        for earlier, later in itertools.pairwise(session):
            assert later.messages[: len(earlier.messages)] == earlier.messages


def test_repeats_differ_in_their_sampling_seed_alone(workload):
    rows = [item for item in workload.items if item.item_id.startswith("repeats-0-")]
    assert len({json.dumps(item.messages) for item in rows}) == 1
    assert len({item.settings.seed for item in rows}) == len(rows) == frozen.PREFIX_BRANCHES


def test_tails_share_a_prefix_of_at_least_450_tokens(workload, encoder):
    rows = [item for item in workload.items if item.item_id.startswith("tails-0-")]
    ids = [encoder.ids(item) for item in rows]
    shared = next(i for i, column in enumerate(zip(*ids, strict=False)) if len(set(column)) > 1)
    assert shared >= 450
    assert len(set(ids)) == len(rows)


def test_edits_predict_the_code_that_was_asked_about(workload):
    edits = [item for item in workload.items if item.category == "edit"]
    assert all(item.prediction.startswith("```python\n") for item in edits)
    # The answer itself would be a prediction that no client has.
    assert all(item.expected.value not in item.prediction for item in edits[:5])


def test_recorded_results_follow_from_the_calls_before_them():
    for number in range(20):
        key = f"replayed-{number}"
        conversation = agentic_session(frozen._random(key), 1 + number % 4)
        world: World = make_world(frozen._random(key))
        calls: list = []
        for message in conversation.messages:
            calls += message.get("tool_calls", ())
            if message["role"] == "tool":
                call = calls.pop(0)
                assert world.call(call["name"], call["arguments"]) == message["content"]
        assert not calls


def test_ids_are_made_where_none_are_stored(workload, encoder, monkeypatch):
    item = workload.items[100]
    monkeypatch.setattr(Encoder, "name", "unknown")
    monkeypatch.setattr("flare_ray.workload.source.decode_items", lambda _: [item])
    found = load_workload(encoder=encoder)
    assert found.tokens == {item.item_id: encoder.ids(item)}


def test_synthetic_prompts_have_exactly_the_tokens_they_name(encoder):
    for item in synthetic_items():
        ids = synthetic_tokens(encoder.codec.encode_prompt, item)
        numbers = list(map(int, item.source.key.split("-")[1:]))
        assert len(ids) == (numbers[0] if len(numbers) == 1 else sum(numbers[:2]))


def test_synthetic_prompt_ends_in_one_repeated_token(encoder):
    encode = encoder.codec.encode_prompt
    (pad,) = encode(PAD)
    short, long = (synthetic_ids(encode, length, seed=3) for length in (3, 1000))
    assert short == (pad,) * 3  # no line is so short
    assert pad not in long[:-10]  # and none is longer than ten
    assert long != synthetic_ids(encode, 1000, seed=4)


def test_importer_reads_turns_and_says_what_it_left_out(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text('{"turns": ["one"]}\n\n{"turns": ["two", "then"]}\n', encoding="utf-8")
    first, second = import_prompts(path, category="reasoning", licence="MIT")
    assert first.messages == ({"role": "user", "content": "one"},)
    assert second.source.key == "line 3 (1 later turns left out)"
    assert second.source.licence == "MIT"


@pytest.mark.parametrize("line", ['{"prompt": "x"}', '{"turns": []}', "no json"])
def test_importer_refuses_another_form_by_line(tmp_path, line):
    path = tmp_path / "set.jsonl"
    path.write_text('{"turns": ["one"]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"set\.jsonl:2"):
        import_prompts(path, category="chat", licence="MIT")


def test_importer_reads_public_prompt_files():
    if not EXTERNAL.is_dir():
        pytest.skip("the external prompt files are not beside this checkout")
    counts = {
        path.stem: len(import_prompts(path, category="chat", licence="as its terms say"))
        for path in EXTERNAL.glob("*.jsonl")
    }
    assert counts == {"gsm8k": 1319, "humaneval": 164, "mbpp": 257, "mt-bench": 80}
