"""The adapter of xgrammar: compiles a structural tag, and matches tokens (contract: K1).

Imported on use, since the library brings torch along. Its compiler is only called by `worker`.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import xgrammar

from flare_ray.actors.grammar.structure import Format
from flare_ray.actors.masks import mask_words
from flare_ray.controller.grammar.utf8 import BROKEN, START, Utf8Masks
from flare_ray.errors import ContractViolation, InvalidRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WHERE = re.compile(r"^\[[0-9:]+\] \S+?:\d+: ")
MAX_REASON_CHARACTERS = 300
TRIED_TOKENS = 24
MASK_LIMIT_S = 0.1
"""Processor time of a mask and the step behind it; usually 10 us to 3 ms at 8,192 tokens."""
MAX_RECURSION = 2_000
"""Depth of the library's own recursion: nested groups of an EBNF, say."""


class Vocabulary:
    """What grammars know of the tokens.

    Args:
        table: bytes by token id, b"" for control tokens; as long as the model's vocabulary.
        eos_ids: terminal tokens, at least one.
    """

    def __init__(self, table: Sequence[bytes], eos_ids: Sequence[int]) -> None:
        self.info = xgrammar.TokenizerInfo(
            # A terminal token that has text of its own is a terminal token all the same.
            [b"" if token in eos_ids else piece for token, piece in enumerate(table)],
            xgrammar.VocabType.RAW,
            vocab_size=len(table),
            stop_token_ids=list(eos_ids),
            add_prefix_space=False,
        )
        # Drafts may hold control tokens; the library would log each one.
        self.unwritable = frozenset(
            token for token, piece in enumerate(table) if not piece and token not in eos_ids
        )


def compile_tag(tag: Format, vocabulary: Vocabulary) -> str:
    """A compiled grammar as text.

    Raises:
        InvalidRequest: the library refuses it, or its masks cost too much.
    """
    xgrammar.set_max_recursion_depth(MAX_RECURSION)
    compiler = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)
    try:
        compiled = compiler.compile_structural_tag(json.dumps(tag))
        text = compiled.serialize_json()
        first = _try_out(xgrammar.GrammarMatcher(compiled), vocabulary.info.vocab_size)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = _WHERE.sub("", str(error).strip().splitlines()[-1] if str(error) else "refused")
        raise InvalidRequest(
            f"the grammar cannot be compiled: {reason[:MAX_REASON_CHARACTERS]}",
            code="invalid_grammar",
        ) from error
    if not first:
        raise InvalidRequest("no token can begin such an output", code="invalid_grammar")
    return text


def _try_out(matcher: xgrammar.GrammarMatcher, vocab_size: int) -> bool:
    """Walk a little way at random; whether any token can begin.

    A grammar with many readings of one text may compile at once and then take seconds a mask, each
    of which would hold the whole engine.

    Raises:
        InvalidRequest: a token took longer than MASK_LIMIT_S.
    """
    rows, choose = np.zeros((1, mask_words(vocab_size)), np.int32), random.Random(0).choice
    for step in range(TRIED_TOKENS):
        started = time.thread_time()
        matcher.fill_next_token_bitmask(rows, 0)
        bits = np.unpackbits(rows[0].view(np.uint8), bitorder="little", count=vocab_size)
        allowed = np.flatnonzero(bits).tolist()
        if not allowed:
            return step > 0
        goes_on = matcher.accept_token(choose(allowed)) and not matcher.is_terminated()
        if time.thread_time() - started > MASK_LIMIT_S:
            raise InvalidRequest(
                f"its masks take more than {MASK_LIMIT_S:g} s each; repeat nothing that may be "
                "empty or that matches the same text in several ways",
                code="invalid_grammar",
            )
        if not goes_on:
            break
    return True


class Compiled:
    """`controller.grammar.matcher.CompiledGrammar` over the library's."""

    def __init__(self, text: str, vocabulary: Vocabulary, utf8: Utf8Masks) -> None:
        self._grammar = xgrammar.CompiledGrammar.deserialize_json(text, vocabulary.info)
        self._vocabulary = vocabulary
        self._utf8 = utf8
        self.num_bytes: int = self._grammar.memory_size_bytes

    def matcher(self) -> Matcher:
        """See `CompiledGrammar`."""
        return Matcher(self._grammar, self._vocabulary, self._utf8)


class Matcher:
    """`controller.grammar.matcher.GrammarMatcher`: the library's, held to well-formed UTF-8."""

    __slots__ = ("_library", "_states", "_unwritable", "_utf8")

    def __init__(
        self, grammar: xgrammar.CompiledGrammar, vocabulary: Vocabulary, utf8: Utf8Masks
    ) -> None:
        self._library = xgrammar.GrammarMatcher(grammar)
        self._unwritable = vocabulary.unwritable
        self._utf8 = utf8
        # How the output's last character stands, now and before each tentative step.
        self._states = [START]

    def fill_mask(self, rows: NDArray[np.int32], row: int) -> None:
        """See `GrammarMatcher`."""
        if self._library.is_terminated():
            rows[row] = -1
            return
        self._library.fill_next_token_bitmask(rows, row)
        mask = rows[row]
        mask &= self._utf8.masks[self._states[-1]]

    def try_token(self, token: int) -> bool:
        """See `GrammarMatcher`."""
        state = self._utf8.after(self._states[-1], token)
        if state == BROKEN or token in self._unwritable or self._library.is_terminated():
            return False
        if not self._library.accept_token(token):
            return False
        self._states.append(state)
        return True

    def undo(self, tokens: int) -> None:
        """See `GrammarMatcher`."""
        if tokens:
            self._library.rollback(tokens)
            del self._states[-tokens:]

    def commit(self, token: int) -> None:
        """See `GrammarMatcher`."""
        if not self.try_token(token):
            raise ContractViolation(f"token {token} was emitted against its request's grammar")
        del self._states[:-1]

    def forced_tokens(self) -> Sequence[int]:
        """See `GrammarMatcher`."""
        return () if self._library.is_terminated() else self._library.find_jump_forward_tokens()

    @property
    def has_ended(self) -> bool:
        """See `GrammarMatcher`."""
        return bool(self._library.is_terminated())

    @property
    def can_end(self) -> bool:
        """See `GrammarMatcher`."""
        return bool(self._library.is_completed()) and self._states[-1] == START
