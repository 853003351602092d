"""Random models of the demo's shape and their checkpoints."""

import json

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.demo_training.qwen.model import QwenModel
from benchmarks.demo_training.qwen.published import from_published, to_published
from benchmarks.demo_training.qwen.shape import checkpoint_config, text_config

SPARSE = 16


def noisy(config, seed=3):
    """A model whose centred norms are away from zero, with weights as published files hold them."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = QwenModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.15 * torch.randn_like(parameter))
    return from_published(model, to_published(model))


@pytest.fixture(scope="session", params=[None, SPARSE], ids=["dense", "sparse"])
def pair(request, tmp_path_factory):
    """A random model and the folder of its checkpoint, the second choosing few tokens."""
    folder, config = tmp_path_factory.mktemp("qwen"), checkpoint_config()
    if request.param:
        config["text_config"]["indexer_budget"] = request.param
    model = noisy(config["text_config"])
    model.set_budget(request.param)
    save_file(to_published(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return model, folder


@pytest.fixture(scope="session")
def model():
    """A random model, dense."""
    return noisy(text_config())
