"""A toy whose texts are chains: each token is followed by one other, at any temperature.

The inputs of the list of known faults are spelled in its vocabulary; the prompt chooses the chain.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.matrix.model import checkpoint
from tests.support.scripted.geometry import Script

CHAINS = {
    "count": ("1 ", "2 ", "3 ", "4 ", "5 ", "6 ", "7 ", "8 ", "<end>"),
    "letters": ("A", "B", "C", "D", "E", "<end>"),
    "semicolon": ("foo;bar", "<end>"),
    "early": ("a", "b", "<stop>", "c", "d", "<end>"),
    "loop": ("u", "v", "w"),
}
VOCABULARY = (*CHAINS, *dict.fromkeys(token for chain in CHAINS.values() for token in chain))
"""The chain's name is its prompt."""
IDS = {text: token for token, text in enumerate(VOCABULARY)}
EOS = (IDS["<end>"], IDS["<stop>"])
WIDTHS = (1, 2, 4, 8)


def following() -> tuple[int, ...]:
    """Next token by token. The end is followed by a letter, for those that ignore it."""
    table = dict.fromkeys(range(len(VOCABULARY)), IDS["A"])
    for name, chain in CHAINS.items():
        for before, after in zip((name, *chain), chain, strict=False):
            if before != "<end>":
                table[IDS[before]] = IDS[after]
    table[IDS["w"]] = IDS["u"]
    return tuple(table[token] for token in range(len(VOCABULARY)))


def chain_script(**fields: object) -> Script:
    """One-hot rows; a drafter that is always right unless `fields` say otherwise."""
    base = {"vocab_size": len(VOCABULARY), "eos_ids": EOS, "next_tokens": following()}
    return Script(**{**base, "drafter": "prefix", "draft_right": 7, **fields})


def chain_checkpoint(folder: Path, script: Script | None = None) -> str:
    """Make `folder` a checkpoint of the chains."""
    return checkpoint(folder, script or chain_script(), VOCABULARY, special=EOS)


def fixed(width: int) -> dict[str, object]:
    """Engine settings of rounds that are always `width` wide."""
    return {"speculation": {"draft_tokens": 7, "policy": "fixed", "fixed_width": width}}
