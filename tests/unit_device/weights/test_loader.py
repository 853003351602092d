"""One rank's tensors: equal to the references in every format, slices that join to the whole."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from flare_ray.device.weights.formats.fp8_block import Fp8BlockParts
from flare_ray.device.weights.formats.nvfp4 import Nvfp4Parts
from flare_ray.device.weights.index import open_checkpoint
from flare_ray.device.weights.loader import RankWeights, Split
from flare_ray.errors import CheckpointError, ConfigError, ContractViolation
from flare_ray.recipes.declaration import TensorSpec
from tests.unit_device.weights.synthetic import (
    CONFIGS,
    CONV,
    DOWN,
    DRAFT_DOWN,
    DRAFT_HEAD,
    DRAFT_NORM,
    GATE,
    HEAD,
    NORM,
    SPECS,
    STORE,
    UP,
    Checkpoint,
    build,
    store_fp8_compressed,
)

FORMS = tuple(CONFIGS)


def load(folder, *, dtype=torch.float32, specs=SPECS, families=("target", "drafter")):
    index = open_checkpoint(folder)
    return RankWeights(index, specs, device="cpu", dtype=dtype, families=families)


@pytest.fixture(scope="module", params=[(form, n) for form in FORMS for n in (1, 3)], ids=str)
def stored(request, tmp_path_factory):
    """Each form, as one file and as shards: (what was written, its folder)."""
    form, shards = request.param
    made = build(form, shards=shards)
    return made, made.write(tmp_path_factory.mktemp(f"{form}-{shards}"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_equals_its_dequantised_reference(stored, dtype):
    made, folder = stored
    weights = load(folder, dtype=dtype)
    for name, value in made.values.items():
        assert torch.equal(weights.tensor(name), value.to(dtype)), name


@pytest.mark.parametrize("count", [2, 4])
def test_slices_of_all_ranks_join_to_the_whole(stored, count):
    made, folder = stored
    weights = load(folder)
    for spec in SPECS:
        if spec.shard_dim is None or spec.name not in made.values:
            continue
        slices = [
            weights.tensor(spec.name, split=Split(spec.shard_dim, rank, count))
            for rank in range(count)
        ]
        whole = made.values[spec.name]
        assert torch.equal(torch.cat(slices, spec.shard_dim), whole), spec.name


def test_requested_type_overrides_the_engine_type(stored):
    made, folder = stored
    loaded = load(folder, dtype=torch.bfloat16).tensor(NORM, dtype=torch.float32)
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, made.values[NORM])


def test_tensor_is_contiguous_and_the_callers_own(stored):
    made, folder = stored
    weights = load(folder, dtype=torch.bfloat16)
    first = weights.tensor(DOWN, split=Split(1, 1, 2))
    assert first.is_contiguous()
    kept = first.clone()
    first.zero_()
    assert torch.equal(weights.tensor(DOWN, split=Split(1, 1, 2)), kept)
    assert not torch.equal(first, kept)
    assert made.values[DOWN].any()


def test_tensor_outlives_a_rewritten_file(tmp_path):
    made = build("bf16")
    weights = load(made.write(tmp_path), dtype=torch.bfloat16)
    loaded = weights.tensor(NORM)
    expected = loaded.clone()
    weights.close()
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert torch.equal(loaded, expected)


@given(
    seed=st.integers(0, 2**31 - 1),
    storage=st.sampled_from(sorted(STORE)),
    groups=st.integers(1, 6),
    rows=st.integers(1, 40),
    count=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=40)
def test_round_trip_of_a_random_matrix(tmp_path_factory, seed, storage, groups, rows, count):
    spec = TensorSpec(
        "a.weight", (rows, groups * 16 * count), "target", quantisable=True, shard_dim=1
    )
    weight = torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed))
    tensors, value = STORE[storage](spec.name, weight)
    form = "fp8" if storage.startswith("fp8") else storage
    config = CONFIGS["bf16" if form == "plain" else form]
    config = dict(config, config_groups=None, targets=None) if form == "fp8" else config
    if form == "compressed":
        group = dict(config["config_groups"]["group_0"], targets=["Linear"])
        config = dict(config, config_groups={"g": group})
    made = Checkpoint(tensors, {"quantization_config": config} if config else {})
    weights = load(made.write(tmp_path_factory.mktemp("random")), specs=(spec,))
    slices = [weights.tensor(spec.name, split=Split(1, rank, count)) for rank in range(count)]
    assert torch.equal(torch.cat(slices, 1), value)


# Packed parts.


@pytest.mark.parametrize("form", ["modelopt", "compressed"])
def test_packed_nvfp4_parts_of_a_slice_dequantise_to_that_slice(tmp_path, form):
    made = build(form)
    weights = load(made.write(tmp_path))
    parts = weights.quantised(DOWN, split=Split(1, 2, 4))
    assert isinstance(parts, Nvfp4Parts)
    assert parts.packed.dtype == torch.uint8
    assert parts.packed.is_contiguous()
    assert parts.global_divides == (form == "compressed")
    assert torch.equal(parts.dequantise(torch.float32), made.values[DOWN][:, 96:144])
    assert torch.equal(
        parts.packed, made.tensors[DOWN + "_packed" * (form == "compressed")][:, 48:72]
    )


def test_packed_parts_carry_the_activation_scale_where_stored(tmp_path):
    weights = load(build("modelopt").write(tmp_path))
    assert weights.quantised(GATE).input_scale == 0.25
    weights = load(build("compressed").write(tmp_path))
    assert weights.quantised(GATE).input_scale is None


def test_gate_and_up_keep_their_own_global_scales(tmp_path):
    made = build("modelopt")
    made.tensors[UP + "_scale_2"] = made.tensors[UP + "_scale_2"] * 3
    weights = load(made.write(tmp_path))
    gate, up = weights.quantised(GATE), weights.quantised(UP)
    assert gate.global_scale == made.tensors[GATE + "_scale_2"]
    assert up.global_scale == made.tensors[UP + "_scale_2"]
    assert torch.equal(weights.tensor(GATE), made.values[GATE])


def test_packed_fp8_parts_cut_inside_a_block_dequantise_to_the_slice(tmp_path):
    made = build("fp8")
    weights = load(made.write(tmp_path))
    parts = weights.quantised(GATE, split=Split(0, 1, 4))
    assert isinstance(parts, Fp8BlockParts)
    assert parts.offset == (8, 0)
    assert parts.scale_inv.shape == (2, 2)
    assert torch.equal(parts.dequantise(torch.float32), made.values[GATE][24:48])


def test_packed_parts_of_a_plain_tensor_are_none_and_no_use(tmp_path):
    weights = load(build("bf16").write(tmp_path))
    assert weights.quantised(GATE) is None
    with pytest.raises(ContractViolation, match="gate_proj"):
        weights.assert_all_used("target")


def test_bf16_block_scales_are_widened(tmp_path):
    stored, value = store_fp8_compressed("a.weight", torch.randn(40, 70))
    made = Checkpoint(stored, {"quantization_config": CONFIGS["fp8"]})
    spec = TensorSpec("a.weight", (40, 70), "target", quantisable=True)
    weights = load(made.write(tmp_path), specs=(spec,))
    assert weights.quantised("a.weight").scale_inv.dtype == torch.float32
    assert torch.equal(weights.tensor("a.weight"), value)


# What is read.


def test_only_the_slice_is_read(tmp_path):
    made = build("bf16")
    weights = load(made.write(tmp_path))
    weights.tensor(DOWN, split=Split(1, 0, 4))
    assert weights.bytes_loaded == 64 * 48 * 2
    weights.tensor(CONV)
    assert weights.bytes_loaded == 64 * 48 * 2 + 64 * 4 * 2


def test_bytes_of_packed_slices_include_the_covering_scales(tmp_path):
    weights = load(build("fp8").write(tmp_path))
    weights.tensor(GATE, split=Split(0, 1, 4))
    assert weights.bytes_loaded == 24 * 64 + 2 * 2 * 4
    weights = load(build("modelopt").write(tmp_path))
    weights.tensor(DOWN, split=Split(1, 0, 2))
    assert weights.bytes_loaded == 64 * 48 + 64 * 6 + 4


def test_shared_tensor_exists_once(tmp_path):
    weights = load(build("bf16").write(tmp_path))
    first = weights.shared(HEAD, split=Split(0, 0, 2))
    assert weights.shared(HEAD, split=Split(0, 0, 2)) is first
    assert weights.shared(HEAD, split=Split(0, 1, 2)) is not first
    assert weights.shared(HEAD, split=Split(0, 0, 2), dtype=torch.bfloat16) is not first


def test_derived_tensor_is_made_once_per_key(tmp_path):
    weights = load(build("bf16").write(tmp_path))
    made = weights.once("turned", lambda: weights.tensor(GATE).T.contiguous())
    assert weights.once("turned", lambda: torch.zeros(1)) is made
    assert weights.once("other", lambda: torch.zeros(1)) is not made


def test_optional_tensor_is_asked_for_before_it_is_read(tmp_path):
    made = build("bf16")
    weights = load(made.write(tmp_path))
    assert not weights.has(DRAFT_HEAD)
    with pytest.raises(ContractViolation, match="ask has"):
        weights.tensor(DRAFT_HEAD)
    made.tensors[DRAFT_HEAD] = torch.ones(64, 96)
    weights = load(made.write(tmp_path))
    assert weights.has(DRAFT_HEAD)
    assert weights.tensor(DRAFT_HEAD).all()


# Refusals.


def test_manifest_faults_are_found_before_any_reading(tmp_path):
    made = build("bf16")
    del made.tensors[NORM]
    with pytest.raises(CheckpointError, match=NORM):
        load(made.write(tmp_path))


def test_unlisted_name_is_our_own_fault(tmp_path):
    weights = load(build("bf16").write(tmp_path))
    for ask in (weights.has, weights.tensor, weights.quantised):
        with pytest.raises(ContractViolation, match=r"a\.stranger"):
            ask("a.stranger")


def test_tensor_of_a_family_not_loaded_is_refused(tmp_path):
    made = build("bf16")
    del made.tensors[DRAFT_NORM]
    weights = load(made.write(tmp_path), families=("target",))
    assert weights.has(NORM)
    with pytest.raises(ContractViolation, match="belongs to the drafter"):
        weights.tensor(DRAFT_NORM)


def test_ranks_that_do_not_divide_a_dimension_are_refused_by_name(tmp_path):
    weights = load(build("bf16").write(tmp_path))
    with pytest.raises(ConfigError, match=r"down_proj.*192 entries.*5 ranks"):
        weights.tensor(DOWN, split=Split(1, 0, 5))


@pytest.mark.parametrize("form", ["modelopt", "compressed"])
def test_split_that_cuts_an_nvfp4_group_is_refused_by_name(tmp_path, form):
    weights = load(build(form).write(tmp_path))
    for ask in (weights.tensor, weights.quantised):
        with pytest.raises(ConfigError, match=r"down_proj.*cut a group of 16"):
            ask(DOWN, split=Split(1, 1, 8))


def test_split_against_the_spec_is_our_own_fault(tmp_path):
    weights = load(build("bf16").write(tmp_path))
    with pytest.raises(ContractViolation, match="shard_dim 0"):
        weights.tensor(GATE, split=Split(1, 0, 2))
    with pytest.raises(ContractViolation, match="shard_dim None"):
        weights.tensor(NORM, split=Split(0, 0, 2))
    assert weights.tensor(NORM, split=Split(0, 0, 1)).shape == (96,)


@pytest.mark.parametrize("split", [Split(0, 2, 2), Split(0, -1, 2), Split(0, 0, 0)])
def test_impossible_split_is_our_own_fault(tmp_path, split):
    weights = load(build("bf16").write(tmp_path))
    with pytest.raises(ContractViolation, match="no part"):
        weights.tensor(GATE, split=split)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
@pytest.mark.parametrize(
    ("form", "part"), [("modelopt", "_scale_2"), ("compressed", "_global_scale")]
)
def test_impossible_global_scale_is_refused_by_name(tmp_path, form, part, value):
    made = build(form)
    made.tensors[GATE + part] = torch.full_like(made.tensors[GATE + part], value)
    weights = load(made.write(tmp_path))
    with pytest.raises(CheckpointError, match=f"gate_proj.weight{part}"):
        weights.tensor(GATE)


def test_builder_that_leaves_tensors_is_caught_by_family_and_name(tmp_path):
    weights = load(build("modelopt").write(tmp_path))
    for spec in SPECS:
        if spec.family == "target" and spec.name not in (UP, DOWN):
            weights.tensor(spec.name)
    weights.quantised(DOWN)
    with pytest.raises(ContractViolation, match=f"left 1 required tensors unread: {UP}"):
        weights.assert_all_used("target")
    weights.tensor(UP)
    weights.assert_all_used("target")
    with pytest.raises(ContractViolation, match="left 2") as caught:
        weights.assert_all_used("drafter")
    assert DRAFT_DOWN in str(caught.value)
    assert DRAFT_HEAD not in str(caught.value)


def test_context_closes_the_files(tmp_path):
    with load(build("bf16", shards=3).write(tmp_path)) as weights:
        kept = weights.shared(NORM)
    assert kept.any()
    assert weights.shared(NORM) is not kept


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_tensors_on_a_gpu_equal_their_references(tmp_path, form, dtype):
    made = build(form)
    index = open_checkpoint(made.write(tmp_path))
    weights = RankWeights(index, SPECS, device="cuda:0", dtype=dtype)
    for name, value in made.values.items():
        loaded = weights.tensor(name)
        assert loaded.device.type == "cuda"
        assert torch.equal(loaded.cpu(), value.to(dtype)), name
    parts = weights.quantised(DOWN, split=Split(1, 1, 2))
    if parts is not None:
        expected = made.values[DOWN][:, 96:]
        assert torch.equal(parts.dequantise(torch.float32).cpu(), expected)
