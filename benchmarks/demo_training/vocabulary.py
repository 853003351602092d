"""The 8,192-entry byte-level BPE of the demo, shared ids first."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from flare_ray.workload.generators.corpus import Corpus

from .family import Family
from .generators import RAW, TOKEN_SHARES, documents
from .shape import LONG_ROW, VOCAB_SIZE

NUM_CONVERSATIONS = 15_000
MAX_TEXT_CHARS = 20_000
_TOKEN_TEXT = re.compile(r"<\|?[a-z_/]+\|?>|\[gMASK\]")


def _texts(corpus: Corpus, family: Family) -> Iterator[str]:
    shares = {c: s for c, s in TOKEN_SHARES.items() if c not in RAW}
    yield from (text[:MAX_TEXT_CHARS] for text in itertools.chain(corpus.code, corpus.docs))
    yield from (f"{g.lemma}: {g.meaning}" for g in (*corpus.common, *corpus.rare))
    yield from itertools.islice(
        documents(random.Random("tokenizer"), corpus, shares, family.chat), NUM_CONVERSATIONS
    )


def train_tokenizer(corpus: Corpus, family: Family) -> Tokenizer:
    """Train on source files, documentation, glosses and generated conversations; digits stay
    single.

    Raises:
        ValueError: if the trained vocabulary has another size, or an added token another id, than
            the checkpoint's shape.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    names = list(family.ids.names)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(t, normalized=False, special=True) for t in names],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (_TOKEN_TEXT.sub(" ", t) for t in _texts(corpus, family)), trainer
    )
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] not in family.ids.tags
    tokenizer = Tokenizer.from_str(json.dumps(data))
    size, ids = tokenizer.get_vocab_size(), [tokenizer.token_to_id(t) for t in names]
    if size != VOCAB_SIZE or ids != list(range(len(names))):
        raise ValueError(
            f"tokenizer has {size} entries and added ids {ids}; want {VOCAB_SIZE} and "
            f"0..{len(names) - 1}: give more text"
        )
    return tokenizer


def tokenizer_config(family: Family) -> dict[str, object]:
    """``tokenizer_config.json`` with the chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": LONG_ROW,
        "eos_token": family.ids.names[family.ids.stop[0]],
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": family.chat.chat_template(),
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path, family: Family) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(family), indent=1, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", "utf-8")
