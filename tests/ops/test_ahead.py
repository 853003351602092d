"""Tensors without data in a CUDA device's place, and weights by their shapes alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flare_ray.config import EngineConfig
from flare_ray.device.ahead import FORMATS, compile_ahead, stored_form
from flare_ray.device.ops.ahead.api import _ShapesForCuda, shapes_alone
from flare_ray.device.pinned import host_rows
from flare_ray.device.prepare import resolve
from flare_ray.device.speculation.inputs import StaticBuffer
from flare_ray.device.weights.budget import format_bytes
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.manifest import open_validated
from flare_ray.errors import ConfigError
from flare_ray.recipes import registry
from flare_ray.recipes.declaration import TensorSpec
from tests.support.deepseek_tiny import write_quantised
from tests.support.served_glm import engine_settings, served_glm

PLAIN_BYTES = 2


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """A tiny checkpoint in the formats of DeepSeek's release."""
    return write_quantised(tmp_path_factory.mktemp("release"), "packed")


def specs_of(folder: Path) -> list[TensorSpec]:
    parts = registry.get("deepseek-v4.1-flash")
    config = json.loads((folder / "config.json").read_text())
    return resolve(parts.manifest)(resolve(parts.geometry)(config))


def test_cuda_tensors_are_shapes_that_call_themselves_cuda_tensors():
    with _ShapesForCuda():
        made = torch.zeros(4, 8, dtype=torch.bfloat16, device="cuda")
        moved = torch.ones(3).to("cuda", torch.float32)
        for tensor in (made, made[:, 1:], made @ made.T, moved, torch.ones_like(made)):
            assert tensor.is_cuda
            assert tensor.device == torch.device("cuda", 0)
            assert shapes_alone(tensor.device)
        assert not torch.ones(2).is_cuda
        assert not shapes_alone("cpu")


def test_alignment_of_views_is_told_apart():
    """It is part of a kernel's specialisation."""
    with _ShapesForCuda():
        made = torch.empty(64, dtype=torch.bfloat16, device="cuda")
        assert [made[offset:].data_ptr() % 16 for offset in (0, 1, 8)] == [0, 2, 0]


def test_buffers_and_host_tables_need_no_device():
    with _ShapesForCuda():
        buffer = StaticBuffer.allocate(6, torch.int64, "cuda").view((2, 3))
        buffer.host[:] = 1
        buffer.upload()
        assert buffer.tensor.is_cuda
        # Far more than this machine holds.
        rows = host_rows(1 << 40, 256, dtype=torch.uint8, device=torch.device("cuda"))
        assert rows.is_pinned()


@pytest.mark.parametrize("experts", FORMATS)
def test_shaped_parts_take_the_bytes_of_their_format(release, experts):
    for spec in specs_of(release):
        form = stored_form(spec, FORMATS[experts])
        assert form.num_bytes == format_bytes(
            spec.shape,
            form.format,
            element_bytes=PLAIN_BYTES,
            block=form.block,
            scale_bytes=form.scale_bytes,
        )


def test_shaped_parts_are_those_of_a_checkpoint_in_the_release_s_formats(release):
    specs = specs_of(release)
    stored = open_validated(release, specs)[1].weights
    shaped = {spec.name: stored_form(spec, FORMATS["mxfp4"]) for spec in specs}
    quantised = [name for name, weight in stored.items() if weight.format != WeightFormat.PLAIN]
    assert quantised
    for name in quantised:
        assert (shaped[name].format, shaped[name].scale_bytes) == (
            stored[name].format,
            stored[name].scale_bytes,
        )
        for role, part in shaped[name].parts.items():
            assert part.shape == stored[name].parts[role].shape


def test_compiling_refuses_an_engine_without_cuda_graphs(tmp_path):
    folder = served_glm(tmp_path / "glm")
    config = EngineConfig.model_validate(engine_settings(folder))
    with pytest.raises(ConfigError, match="device: cuda"):
        compile_ahead(config, tmp_path / "kernels", experts="bfloat16")
    with pytest.raises(ConfigError, match="choose one of bfloat16, nvfp4, mxfp4"):
        compile_ahead(config, tmp_path / "kernels", experts="int3")
