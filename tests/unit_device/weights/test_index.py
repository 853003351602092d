"""Headers of a checkpoint folder: every damaged or missing thing is named before any allocation."""

import json
import struct
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from flare_ray.device.weights.index import open_checkpoint, scan_checkpoint
from flare_ray.errors import CheckpointError
from tests.unit_device.weights.synthetic import GATE, NORM, build

SHARDS = 3
HEADER_CPU_SECONDS = 15.0
"""Measured 0.3 s; reading the data instead would take minutes."""
INDEX = "model.safetensors.index.json"


def problems_of(folder):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    for line in caught.value.problems:
        assert line in str(caught.value)
    return caught.value.problems


def assert_named(problems, *fragments):
    """Some single problem holds every fragment."""
    assert any(all(part in line for part in fragments) for line in problems), problems


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def write_raw(folder, entries, data=b"", *, header=None):
    """A model.safetensors whose header is written as given."""
    raw = json.dumps(entries).encode() if header is None else header
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("shards", [1, SHARDS])
def test_index_holds_every_tensor_with_type_shape_and_bytes(tmp_path, shards):
    made = build("modelopt", shards=shards)
    index = open_checkpoint(made.write(tmp_path))
    assert index.tensors.keys() == made.tensors.keys()
    for name, tensor in made.tensors.items():
        stored = index.tensors[name]
        assert stored.shape == tuple(tensor.shape)
        assert stored.num_bytes == tensor.numel() * tensor.element_size()
    assert index.tensors[GATE].dtype == "U8"
    assert index.tensors[GATE + "_scale"].dtype == "F8_E4M3"
    assert index.total_bytes == sum(t.numel() * t.element_size() for t in made.tensors.values())
    assert index.quantisation["quant_algo"] == "NVFP4"
    assert index.notices == ()


def test_index_reads_modelopt_file_where_config_has_no_section(tmp_path):
    folder = build("bf16").write(tmp_path)
    content = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(content))
    quantisation = open_checkpoint(folder).quantisation
    assert quantisation == {"quant_method": "modelopt", **content["quantization"]}


def test_index_reads_quantisation_nested_in_text_config(tmp_path):
    made = build("fp8")
    made.config["text_config"] = {"quantization_config": made.config.pop("quantization_config")}
    assert open_checkpoint(made.write(tmp_path)).quantisation["quant_method"] == "fp8"


def test_missing_folder_is_named(tmp_path):
    assert_named(problems_of(tmp_path / "absent"), "absent", "no such folder")


def test_missing_config_and_weights_are_both_named(tmp_path):
    problems = problems_of(tmp_path)
    assert_named(problems, "config.json", "missing")
    assert_named(problems, "neither model.safetensors nor")


def test_truncated_data_names_each_tensor_that_ends_beyond_the_file(tmp_path):
    path = build("bf16").write(tmp_path) / "model.safetensors"
    whole = open_checkpoint(tmp_path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - whole.total_bytes + 10)
    problems = problems_of(tmp_path)
    assert len(problems) == len(whole.tensors)
    for name in whole.tensors:
        assert_named(problems, name, "truncated")


@pytest.mark.parametrize("size", [0, 5, 8, 40])
def test_file_truncated_inside_its_header_is_named(tmp_path, size):
    path = build("bf16").write(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert_named(problems_of(tmp_path), "model.safetensors", "truncated")


def test_file_of_another_format_is_named(tmp_path):
    write_raw(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(b"PK\x03\x04" + b"\xff" * 60)
    assert_named(problems_of(tmp_path), "model.safetensors", "no safetensors file")


@pytest.mark.parametrize("header", [b"{broken", b"\xff\xfe", b"[" * 100_000])
def test_header_without_valid_json_is_named(tmp_path, header):
    write_raw(tmp_path, {}, header=header)
    assert_named(problems_of(tmp_path), "model.safetensors", "no valid JSON")


def test_header_that_is_no_object_is_named(tmp_path):
    write_raw(tmp_path, [])
    assert_named(problems_of(tmp_path), "model.safetensors", "no JSON object")


def test_name_stored_twice_in_one_file_is_named(tmp_path):
    entry = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    write_raw(tmp_path, {}, b"\0", header=b'{"a.weight":' + entry + b',"a.weight":' + entry + b"}")
    assert_named(problems_of(tmp_path), "a.weight", "twice")


@pytest.mark.parametrize(
    ("entry", "fragment"),
    [
        ({"dtype": "F12", "shape": [1], "data_offsets": [0, 4]}, "unknown type 'F12'"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "no list of sizes"),
        ({"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}, "no list of sizes"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "no [begin, end]"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0]}, "no [begin, end]"),
        ({"dtype": "F32", "shape": [1]}, "no [begin, end]"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "needs 8"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "truncated"),
        ([], "no object"),
    ],
)
def test_damaged_header_entry_is_named(tmp_path, entry, fragment):
    write_raw(tmp_path, {"a.weight": entry}, b"\0" * 4)
    assert_named(problems_of(tmp_path), "a.weight", fragment)


@pytest.mark.parametrize(
    ("second", "data_bytes", "fragment"),
    [([2, 6], 6, "overlaps"), ([6, 10], 10, "hole"), ([4, 8], 9, "1 bytes after")],
)
def test_data_not_covered_exactly_once_is_named(tmp_path, second, data_bytes, fragment):
    entries = {
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": second},
    }
    write_raw(tmp_path, entries, b"\0" * data_bytes)
    assert_named(problems_of(tmp_path), fragment)


def test_shard_that_does_not_exist_is_named_once(tmp_path):
    folder = build("bf16", shards=SHARDS).write(tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    problems = problems_of(folder)
    assert len(problems) == 1
    assert_named(problems, "model-00002-of-00003.safetensors", "no such file")


def test_name_that_its_shard_lacks_is_named(tmp_path):
    folder = build("bf16", shards=SHARDS).write(tmp_path)
    file = "model-00001-of-00003.safetensors"
    edit_json(folder / INDEX, lambda c: c["weight_map"].update({"ghost.weight": file}))
    assert_named(problems_of(folder), "ghost.weight", file, "does not hold it")


def test_name_stored_in_another_shard_than_indexed_is_named(tmp_path):
    folder = build("bf16", shards=SHARDS).write(tmp_path)
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]

    def move(content):
        weight_map = content["weight_map"]
        weight_map[NORM] = next(file for file in files if file != weight_map[NORM])

    edit_json(folder / INDEX, move)
    problems = problems_of(folder)
    assert_named(problems, NORM, "does not hold it")
    assert_named(problems, NORM, "against", "which places it in")


def test_tensor_that_the_index_does_not_name_is_named(tmp_path):
    folder = build("bf16", shards=SHARDS).write(tmp_path)
    edit_json(folder / INDEX, lambda c: c["weight_map"].pop(NORM))
    assert_named(problems_of(folder), NORM, "which does not name it")


def test_name_indexed_twice_is_named(tmp_path):
    folder = build("bf16", shards=SHARDS).write(tmp_path)
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(
        text.replace(
            '"weight_map": {', f'"weight_map": {{"{NORM}": "model-00001-of-00003.safetensors", '
        )
    )
    assert_named(problems_of(folder), NORM, "twice")


@pytest.mark.parametrize("file", ["../model.safetensors", "sub/a.safetensors", 3])
def test_index_entry_that_is_no_file_of_the_folder_is_named(tmp_path, file):
    folder = build("bf16", shards=SHARDS).write(tmp_path)
    edit_json(folder / INDEX, lambda c: c["weight_map"].update({NORM: file}))
    assert_named(problems_of(folder), NORM, repr(file))


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "{"])
def test_index_without_weight_map_is_named(tmp_path, content):
    folder = build("bf16", shards=SHARDS).write(tmp_path)
    (folder / INDEX).write_text(content)
    assert_named(problems_of(folder), INDEX)


def test_single_file_beside_an_index_that_does_not_name_it_is_refused(tmp_path):
    folder = build("bf16", shards=SHARDS).write(tmp_path)
    build("bf16").write(folder)
    assert_named(problems_of(folder), "model.safetensors", "remove one")


def test_every_problem_is_collected_not_only_the_first(tmp_path):
    folder = build("bf16", shards=SHARDS).write(tmp_path)
    (folder / "config.json").write_text("{")
    (folder / "model-00001-of-00003.safetensors").unlink()
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    problems = problems_of(folder)
    assert_named(problems, "config.json", "no valid JSON")
    assert_named(problems, "model-00001-of-00003.safetensors", "no such file")
    assert_named(problems, "model-00002-of-00003.safetensors", "truncated")


def test_foreign_file_and_wrong_total_are_notices_not_problems(tmp_path):
    made = build("bf16", shards=SHARDS)
    made.total_size = 17
    folder = made.write(tmp_path)
    (folder / "consolidated.safetensors").write_bytes(b"")
    notices = open_checkpoint(folder).notices
    assert any("consolidated.safetensors" in line for line in notices)
    assert any("total_size is 17" in line for line in notices)


def test_scan_hands_back_what_can_be_read_beside_the_problems(tmp_path):
    folder = build("bf16", shards=SHARDS).write(tmp_path)
    (folder / "model-00001-of-00003.safetensors").unlink()
    index, problems = scan_checkpoint(folder)
    assert len(problems) == 1
    assert 0 < len(index.tensors) < len(build("bf16").tensors)


def test_headers_alone_are_read(tmp_path):
    """A sparse file of 20,000 tensors and 625 GiB costs a moment and its header's memory."""
    step = 32 * 2**20
    entries = {
        f"layers.{i}.weight": {
            "dtype": "BF16",
            "shape": [step // 2],
            "data_offsets": [i * step, (i + 1) * step],
        }
        for i in range(20_000)
    }
    write_raw(tmp_path, entries)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + len(entries) * step)
    start = time.process_time()
    assert open_checkpoint(tmp_path).total_bytes == len(entries) * step
    assert time.process_time() - start < HEADER_CPU_SECONDS


@given(flips=st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 255)), min_size=1, max_size=6))
@settings(max_examples=150)
def test_damaged_header_bytes_give_problems_or_a_consistent_index(tmp_path_factory, flips):
    """Whatever bytes a download damages, the answer is a report, never another exception."""
    folder = tmp_path_factory.getbasetemp() / "flipped"
    path = build("fp8").write(folder) / "model.safetensors"
    raw = bytearray(path.read_bytes())
    for place, mask in flips:
        raw[place] ^= mask
    path.write_bytes(bytes(raw))
    index, problems = scan_checkpoint(folder)
    if not problems:
        header = 8 + int.from_bytes(raw[:8], "little")
        assert index.total_bytes == len(raw) - header
