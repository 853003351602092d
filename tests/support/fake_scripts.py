"""What fake ranks say: token scripts, and tables of accepted drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Script = Callable[[tuple[int, ...], int], int]
"""(prompt, index) -> the output token number `index`, from 0."""
AcceptTable = Callable[[tuple[int, ...], int, int], bool]
"""(prompt, generated tokens at the round's start, depth from 1) -> the draft there is accepted."""


def hashed_script(vocab_size: int, first_token: int = 0) -> Script:
    """Text that depends on the prompt alone, tokens in first_token .. vocab_size - 1.

    Hashes of tuples of integers do not vary between runs.
    """

    def token(prompt: tuple[int, ...], index: int) -> int:
        span = vocab_size - first_token
        return first_token + hash((prompt, index)) % span

    return token


def listed_script(texts: dict[tuple[int, ...], Sequence[int]], then: int = 0) -> Script:
    """Given outputs by prompt; `then` for ever after the end of one."""

    def token(prompt: tuple[int, ...], index: int) -> int:
        text = texts[prompt]
        return text[index] if index < len(text) else then

    return token


def hashed_accepts(rate: float) -> AcceptTable:
    """Each depth accepted with about this rate, reproducibly."""
    return lambda prompt, generated, depth: hash((prompt, generated, depth)) % 1000 < rate * 1000


def accepts_up_to(count: int) -> AcceptTable:
    """The first `count` depths are accepted."""
    return lambda _prompt, _generated, depth: depth <= count


def draft_passes(
    script: Script, accepts: AcceptTable, prompt: tuple[int, ...], before: int
) -> Callable[[int, Sequence[int]], bool]:
    """Whether the draft of a depth (from 0) passes, given the lane's copies: one that is copied
    passes if it is the text's own token.

    Args:
        before: tokens generated at the round's start.
    """

    def passes(depth: int, copies: Sequence[int]) -> bool:
        if depth < len(copies) and copies[depth] >= 0:
            return copies[depth] == script(prompt, before + depth)
        return accepts(prompt, before, depth + 1)

    return passes
