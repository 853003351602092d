"""Strings of a JSON grammar: exact lengths, and masks that are prepared when it is compiled."""

import json

import numpy as np
import pytest

from flare_ray.controller.grammar.json_language import JsonLanguage
from flare_ray.controller.grammar.language import to_ebnf
from tests.support.grammar_engine import VOCAB_SIZE

WORDS = -(-VOCAB_SIZE // 32)
LONGEST = 140
BOUNDS = ((0, 0), (0, 5), (3, 3), (0, 31), (1, 32), (31, 33), (32, 32), (5, 64), (40, 100))
ENDLESS = ((0, None), (1, None), (31, None), (32, None), (70, None))


@pytest.mark.parametrize(("least", "most"), BOUNDS + ENDLESS)
@pytest.mark.parametrize("spelling", ["a", "\\n", "é"])
def test_lengths_are_counted_exactly(least, most, spelling, compile_, codec):
    bounds = {"minLength": least} | ({} if most is None else {"maxLength": most})
    matcher = compile_("json_schema", json.dumps({"type": "string", **bounds})).matcher()
    ids = {bytes(piece): token for token, piece in enumerate(codec.token_bytes[:VOCAB_SIZE])}
    quote, letter = ids[b'"'], [ids[bytes([byte])] for byte in spelling.encode()]
    matcher.commit(quote)
    last = LONGEST if most is None else most
    for length in range(last + 1):
        rows = np.zeros((1, WORDS), np.int32)
        matcher.fill_mask(rows, 0)
        allowed = np.flatnonzero(np.unpackbits(rows[0].view(np.uint8), bitorder="little"))
        assert (quote in allowed) == (length >= least)
        assert (letter[0] in allowed) == (length < last or most is None)
        if length < last:
            for token in letter:
                matcher.commit(token)


PIECES = [bytes([byte]) for byte in range(256)]
PIECES += [f"{first}{second} w".encode() for first in "abcdefghijklmnop" for second in "xyz,.!"]
TERMINAL = len(PIECES)
PREPARED = 0.2
"""Share of the vocabulary that a mask may have to try at run time."""


def tried(ebnf: str) -> list[float]:
    """By state of the compiled grammar, the share of tokens that are tried when a mask is
    written."""
    from flare_ray.actors.grammar.xgrammar import Vocabulary, compile_tag

    vocabulary = Vocabulary([*PIECES, b""], (TERMINAL,))
    tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": ebnf}}
    cache = json.loads(compile_tag(tag, vocabulary))["adaptive_token_mask_cache"]
    return [len(state["uncertain_indices"]) / len(PIECES) for _, state in cache]


@pytest.mark.parametrize(
    "bounds", [{}, {"maxLength": 31}, {"minLength": 3}, {"minLength": 2, "maxLength": 20}], ids=str
)
def test_masks_inside_a_string_are_prepared(bounds):
    schema = {"type": "object", "properties": {"a": {"type": "string", **bounds}}}
    assert max(tried(to_ebnf("root", JsonLanguage(schema).rules))) < PREPARED


def test_masks_of_long_bounded_strings_are_prepared_but_at_borders_of_blocks():
    shares = tried(to_ebnf("root", JsonLanguage({"type": "string", "maxLength": 500}).rules))
    assert np.mean([share > PREPARED for share in shares]) < 0.2


def test_a_rule_for_every_character_leaves_most_tokens_to_be_tried():
    nested = 'root ::= "\\"" c* "\\""\nc ::= [a-z ,.!] | ("\\\\" (["n] | ("u" [0-9])))\n'
    assert max(tried(nested)) > PREPARED
