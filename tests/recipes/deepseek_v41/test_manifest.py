"""Names, shapes, parameter counts and state bytes of the published model, from shapes alone."""

from __future__ import annotations

import math

import pytest

from flare_ray.device.weights.budget import format_bytes, rank_shape
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.recipes.deepseek_v41.geometry import Mode, read_geometry
from flare_ray.recipes.deepseek_v41.state import state_spec
from flare_ray.recipes.deepseek_v41.weights import manifest
from tests.recipes.deepseek_v41.published import LAYERS, published_config
from tests.support.model_shapes import state_bytes

GEOMETRY = read_geometry(published_config())
SPECS = manifest(GEOMETRY)
TABLE_PARAMETERS = (384_006_168 + 384_016_682) * 256
# The card says 552 B, 196 B and 14.2 B; the exact numbers follow from the shapes of the audit.
TARGET_PARAMETERS = 748_494_684_784
DRAFTER_PARAMETERS = 14_225_362_530
PAYLOAD_BYTES = 510_286_023_000
"""Of all 48 shards, vision tower included (header audit)."""
TEXT_BYTES = 509_315_486_040
GIB = 1 << 30
DRAFTER_TENSORS_BUT_EXPERTS = 97
"""Stored ones, scales included (header audit of all 48 shards)."""


def parameters(family: str) -> int:
    return sum(math.prod(spec.shape) for spec in SPECS if spec.family == family)


def test_parameter_counts_are_the_published_ones():
    assert parameters("target") == TARGET_PARAMETERS
    assert parameters("drafter") == DRAFTER_PARAMETERS
    assert round((TARGET_PARAMETERS - TABLE_PARAMETERS) / 1e9) == 552
    assert TABLE_PARAMETERS // 10**9 == 196


def test_drafter_has_the_published_number_of_tensors():
    drafter = [s for s in SPECS if s.family == "drafter" and ".experts." not in s.name]
    scales = [spec for spec in drafter if spec.quantisable]
    assert len(drafter) + len(scales) == DRAFTER_TENSORS_BUT_EXPERTS
    assert all(spec.name.startswith("mtp.") for spec in drafter)


def test_every_name_is_listed_once():
    assert len({spec.name for spec in SPECS}) == len(SPECS)


def test_published_names_and_shapes():
    shapes = {spec.name: spec.shape for spec in SPECS}
    for name, shape in {
        "embed.weight": (129280, 5120),
        "layers.0.hc_attn_fn": (24, 20480),
        "layers.0.attn.wq_b.weight": (32768, 1280),
        "layers.0.attn.wo_a.weight": (8192, 4096),
        "layers.0.attn.attn_sink": (64,),
        "layers.2.attn.compressor.wgate.weight": (512, 5120),
        "layers.20.attn.compressor.norm.weight": (512,),
        "layers.36.attn.indexer.weights_proj.weight": (32, 5120),
        "layers.8.attn.indexer.wk.weight": (128, 512),
        "layers.39.ffn.gate.bias_vl": (384,),
        "layers.39.ffn.experts.383.w2.weight": (5120, 2304),
        "layers.14.engram.embed.weight": (384016682, 256),
        "layers.1.engram.wkv.weight": (25600, 6144),
        "layers.1.engram.q_weight": (4, 5120),
        "mtp.0.main_proj.weight": (5120, 15360),
        "mtp.2.ffn.experts.127.w1.weight": (2304, 5120),
        "mtp.2.markov_head.head.weight": (129280, 256),
        "mtp.2.confidence_head.proj.weight": (1, 5376),
    }.items():
        assert shapes[name] == shape, name
    for absent in (
        "layers.20.attn.compressor.wgate.weight",
        "layers.3.attn.indexer.wq_b.weight",
        "layers.24.attn.indexer.wk.weight",
        "mtp.1.main_norm.weight",
        "mtp.0.attn.compressor.wkv.weight",
    ):
        assert absent not in shapes


def test_layer_modes_are_derived_from_the_source_lists():
    modes = [GEOMETRY.mode(layer) for layer in range(LAYERS)]
    numbers = {mode: [n for n, m in enumerate(modes) if m is mode] for mode in Mode}
    assert numbers[Mode.WINDOW] == [0, 1]
    assert numbers[Mode.FULL] == [2, 8, 14, 20]
    assert numbers[Mode.REINDEX] == [24, 28, 32, 36]
    assert [GEOMETRY.kv_source(layer) for layer in (2, 7, 8, 19, 20, 39)] == [2, 2, 8, 14, 20, 20]


def test_quantisable_are_the_matrices_of_the_published_release():
    kinds = {
        ".".join(p for p in s.name.split(".")[2:] if not p.isdigit())
        for s in SPECS
        if s.quantisable
    }
    assert kinds == {
        *(f"attn.{part}.weight" for part in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")),
        "attn.indexer.wq_b.weight",
        *(f"ffn.experts.{part}.weight" for part in ("w1", "w2", "w3")),
        *(f"ffn.shared_experts.{part}.weight" for part in ("w1", "w2", "w3")),
        *("engram.embed.weight", "engram.wkv.weight", "main_proj.weight"),
    }


def stored_format(spec) -> tuple[WeightFormat, tuple[int, int]]:
    """How the release stores a tensor."""
    if not spec.quantisable:
        return WeightFormat.PLAIN, (1, 1)
    if ".experts." in spec.name:
        return WeightFormat.MXFP4, (1, 32)
    return WeightFormat.FP8_BLOCK, (1, 32) if "engram.embed" in spec.name else (32, 32)


def stored_bytes(world_size: int) -> tuple[int, int]:
    """Bytes of one rank in the release's formats: everything but the tables, and the tables."""
    rest = tables = 0
    for spec in SPECS:
        format, block = stored_format(spec)
        wide = any(part in spec.name for part in ("hc_", "bias", "attn_sink"))
        size = format_bytes(
            rank_shape(spec, world_size),
            format,
            element_bytes=4 if wide else 2,
            block=block,
            scale_bytes=1,
        )
        if "engram.embed" in spec.name:
            tables += size
        else:
            rest += size
    return rest, tables


def test_stored_bytes_are_the_published_payload():
    """475.2 GiB with the vision tower, whose tensors take the remaining 0.9 GiB."""
    rest, tables = stored_bytes(1)
    assert rest + tables == TEXT_BYTES
    assert 0 < PAYLOAD_BYTES - TEXT_BYTES < 1.0e9


@pytest.mark.parametrize(("world_size", "rest", "tables"), [(2, 144, 94.4), (4, 75, 47.2)])
def test_ranks_share_experts_heads_and_tables(world_size, rest, tables):
    ours = [size / GIB for size in stored_bytes(world_size)]
    assert ours[0] == pytest.approx(rest, abs=3) and ours[1] == pytest.approx(tables, abs=0.1)


def test_state_bytes_are_the_published_ones():
    """3,200 bytes a token in bfloat16 (890 packed), 40 windows, 3 drafter windows, three pending
    rows; rings are eight rows longer than windows."""
    sizes = state_bytes(state_spec(GEOMETRY, 1), GEOMETRY.vocab_size)

    def total(beginning: str, end: str) -> int:
        return sum(
            n for name, n in sizes.items() if name.startswith(beginning) and name.endswith(end)
        )

    assert total("layers.", "entries") + total("layers.", "index_keys") == 64 * 3_200
    assert total("layers.", "window") == 40 * 135 * 512 * 2
    assert total("mtp.", "window") == 3 * 136 * 512 * 2
    assert total("layers.", "raw") == 3 * 9 * 2 * 512 * 4
    assert sizes["engram.ids"] == 11 * 8
    assert sizes["tail"] == 0
