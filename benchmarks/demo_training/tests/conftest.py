"""The model that the tests of network and decoding share."""

import json

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.demo_training.network import DemoModel, from_published, to_published
from benchmarks.demo_training.reference import Reference
from benchmarks.demo_training.shape import text_config


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random training model and the reference over its exported weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(3)
    torch.set_num_threads(1)
    tensors = to_published(DemoModel(text_config()))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"text_config": text_config()}))
    return from_published(DemoModel(text_config()), tensors).eval(), Reference(folder)
