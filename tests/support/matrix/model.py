"""The micro checkpoint and its exact law, written as a plain loop over one history.

Texts can be read back: a token's first character says which token it is.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flare_ray.config import EngineConfig
from tests.support.matrix.grammar import allowed, language
from tests.support.scripted.geometry import Script, write_checkpoint
from tests.support.scripted.recipe import DOTTED

TOKENS = (*"abcdefgh", "Xy", "Yxx", "Zab", "Wcd", "é", "Vé", '"', "<end>")
EOS = len(TOKENS) - 1
TABLE = tuple(b"" if token == EOS else text.encode() for token, text in enumerate(TOKENS))
SCRIPT = Script(
    vocab_size=len(TOKENS),
    order=2,
    seed=31,
    spread=1.3,
    eos_ids=(EOS,),
    draft_noise=0.6,
    max_context_tokens=4096,
)
WRONG = Script(**{**SCRIPT.__dict__, "drafter": "list", "draft_tokens": (0, 1, 2, 3, 4, 5, 6)})
"""A drafter that is right by chance alone."""


def checkpoint(
    folder: Path,
    script: Script,
    tokens: Sequence[str] = TOKENS,
    *,
    special: Sequence[int] = (EOS,),
) -> str:
    """Make `folder` a checkpoint whose vocabulary is `tokens`, those of `special` without text."""
    write_checkpoint(folder, script)
    vocabulary = {text: token for token, text in enumerate(tokens)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "added_tokens": [
            {"id": token, "content": tokens[token], "special": True, **flags} for token in special
        ],
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "model.safetensors").touch()
    return str(folder)


def engine_config(folder: str, **settings: object) -> EngineConfig:
    """A small engine on this process's CPU."""
    base = {"concurrency": 4, "context_tokens": 256, "prefill_tokens": 16, "page_pool_tokens": 4096}
    return EngineConfig.model_validate(
        {**base, "checkpoint": folder, "recipe": DOTTED, "device": "cpu", "dtype": "float32"}
        | settings
    )


def read_back(text: str) -> list[int]:
    """Tokens of a text; the last one may be cut short."""
    tokens = []
    while text:
        token = next(t for t, spelled in enumerate(TOKENS[:EOS]) if spelled[0] == text[0])
        tokens.append(token)
        text = text[len(TOKENS[token]) :]
    return tokens


@functools.cache
def rows() -> np.ndarray:
    """[V * V, V] float64 logits."""
    table: np.ndarray = SCRIPT.table().numpy().astype(np.float64)
    return table


def own_logprobs(prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """[V] the model's own log-probabilities of the next token."""
    row = _row([*prompt, *output])
    shifted: np.ndarray = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def law(fields: dict, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """[V] exact probabilities of the next token under a request's fields. A grammar's only way out
    is the end, also where it is banned (`ends_unsaid`)."""
    if ends_unsaid(fields, prompt, output):
        return np.eye(len(TOKENS))[EOS]
    row = _biased_row(fields, prompt, output)
    if fields["temperature"] == 0:
        return np.eye(len(TOKENS))[int(np.argmax(row))]
    return _filtered(row / fields["temperature"], fields)


def ends_unsaid(fields: dict, prompt: Sequence[int], output: Sequence[int]) -> bool:
    """Bans and the grammar leave no token behind a whole output: it ends there without a terminal
    token."""
    if np.isfinite(_biased_row(fields, prompt, output)).any():
        return False
    text = "".join(TOKENS[token] for token in output)
    assert allowed(language(fields), text, TOKENS, EOS)[EOS], f"no token goes behind {text!r}"
    return True


def _biased_row(fields: dict, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """[V] logits behind penalties, biases, bans and the grammar."""
    row = _row([*prompt, *output])
    counts = Counter(output)
    repetition = fields.get("repetition_penalty", 1.0)
    for token in range(len(TOKENS)):
        if token in counts or token in prompt:
            row[token] *= repetition if row[token] <= 0 else 1 / repetition
        row[token] -= counts[token] * fields.get("frequency_penalty", 0.0)
        row[token] -= (counts[token] > 0) * fields.get("presence_penalty", 0.0)
    for token, addend in fields.get("logit_bias", {}).items():
        row[int(token)] += addend
    if len(output) < fields.get("min_tokens", 0):
        row[[EOS, *fields.get("stop_token_ids", ())]] = -np.inf
    for word in fields.get("bad_words", ()):
        banned = read_back(word)
        if list(output[len(output) - len(banned) + 1 :]) == banned[:-1]:
            row[banned[-1]] = -np.inf
    if pattern := language(fields):
        text = "".join(TOKENS[token] for token in output)
        row[~allowed(pattern, text, TOKENS, EOS)] = -np.inf
    return row


def _row(tokens: Sequence[int]) -> np.ndarray:
    before = tokens[-2] if len(tokens) > 1 else 0
    row: np.ndarray = rows()[before * len(TOKENS) + tokens[-1]].copy()
    return row


def _filtered(scaled: np.ndarray, fields: dict) -> np.ndarray:
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    kept = np.zeros(len(probs), dtype=bool)
    mass, goal = 0.0, fields["top_p"] * probs.sum()
    for token in order:
        kept[token] = True
        mass += probs[token]
        if mass >= goal:
            break
    kept &= probs >= fields.get("min_p", 0.0) * probs.max()
    filtered: np.ndarray = np.where(kept, probs, 0.0) / probs[kept].sum()
    return filtered
