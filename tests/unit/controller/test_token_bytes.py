"""Bytes of tokens against the tokenizers library, for both kinds of vocabulary."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from flare_ray.controller.grammar.token_bytes import load_token_bytes, token_bytes
from flare_ray.errors import CheckpointError

TEXTS = ["hello  world\n\tif x:", "在线 café 🙂 naïve", "a\u0000b\x7f\x80 ÿ¡", "<tool>x</tool>"]


@pytest.fixture
def byte_level(tmp_path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False, special=False)])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return tokenizer, path


@pytest.fixture
def byte_fallback(tmp_path):
    vocabulary = {"<unk>": 0, "<s>": 1}
    vocabulary.update({f"<0x{byte:02X}>": 2 + byte for byte in range(256)})
    for piece in ["\u2581", "h", "i", "hi", "\u2581hi", "é"]:
        vocabulary[piece] = len(vocabulary)
    merges = [("h", "i"), ("\u2581", "hi")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<s>"])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return tokenizer, path


@pytest.mark.parametrize("text", TEXTS)
def test_concatenated_bytes_are_the_text_for_a_byte_level_vocabulary(byte_level, text):
    tokenizer, path = byte_level
    table = token_bytes(path)
    assert b"".join(table[token] for token in tokenizer.encode(text).ids) == text.encode()


@pytest.mark.parametrize("text", ["hi hi", "é 在 hi", "🙂"])
def test_concatenated_bytes_are_the_text_for_a_byte_fallback_vocabulary(byte_fallback, text):
    tokenizer, path = byte_fallback
    table = token_bytes(path)
    assert b"".join(table[token] for token in tokenizer.encode(text).ids) == text.encode()


def test_every_single_byte_has_a_token(byte_level):
    _, path = byte_level
    assert {bytes([byte]) for byte in range(256)} <= set(token_bytes(path))


def test_special_tokens_have_no_bytes_and_added_words_have_theirs(byte_level):
    tokenizer, path = byte_level
    loaded = load_token_bytes(path)
    end, tool = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<tool>")
    assert loaded.table[end] == b"" and end in loaded.special_ids
    assert loaded.table[tool] == b"<tool>" and tool not in loaded.special_ids


def test_padded_vocabulary_is_covered(byte_level):
    tokenizer, path = byte_level
    size = tokenizer.get_vocab_size()
    table = token_bytes(path, vocab_size=size + 10)
    assert len(table) == size + 10 and table[-1] == b""


def test_vocabulary_smaller_than_the_tokenizers_is_refused(byte_level):
    _, path = byte_level
    with pytest.raises(CheckpointError, match="vocabulary ends at 199"):
        token_bytes(path, vocab_size=200)


@pytest.mark.parametrize(
    "damage",
    [
        lambda document: document.update(decoder={"type": "WordPiece"}),
        lambda document: document.update(decoder=None),
        lambda document: document.pop("model"),
        lambda document: document["model"].update(vocab=[["a", 0.5]]),
    ],
    ids=["other-decoder", "no-decoder", "no-model", "unigram"],
)
def test_unreadable_tokenizer_is_refused_with_its_path(byte_level, damage):
    _, path = byte_level
    document = json.loads(path.read_text())
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        token_bytes(path)


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(CheckpointError):
        token_bytes(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(CheckpointError):
        token_bytes(tmp_path / "broken.json")
