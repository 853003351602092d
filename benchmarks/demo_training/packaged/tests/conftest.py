"""A tiny model without a drafter, with a tokenizer of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.llama_tiny import UNDRAFTED, write_checkpoint

VOCABULARY = 280
"""Three markers and every byte, and some ids that no text contains."""


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint."""
    path = tmp_path_factory.mktemp("packaged")
    sizes = {"vocab_size": VOCABULARY, "head_dim": 8}
    write_checkpoint(path, "llama-odd", **UNDRAFTED, **sizes)
    markers = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: n for n, text in enumerate([*markers, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in markers])
    tokenizer.save(str(path / "tokenizer.json"))
    return path
