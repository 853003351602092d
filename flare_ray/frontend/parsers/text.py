"""Finding tags in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def find_first(text: str, tags: Sequence[str], start: int = 0) -> tuple[int, str]:
    """Position and text of the earliest tag at or after `start`; (-1, "") where there is none."""
    found = (-1, "")
    for tag in tags:
        at = text.find(tag, start)
        if at >= 0 and (found[0] < 0 or at < found[0]):
            found = (at, tag)
    return found


def held_back(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of `text` that may still grow into one of `tags`."""
    longest = max((len(tag) for tag in tags), default=1) - 1
    tail = text[-longest:] if longest else ""
    if not any(tag[0] in tail for tag in tags):
        return 0
    for length in range(min(longest, len(text)), 0, -1):
        if any(tag.startswith(text[-length:]) and len(tag) > length for tag in tags):
            return length
    return 0


def could_begin(text: str, tags: Sequence[str]) -> bool:
    """Whether `text` is a proper beginning of one of `tags`, or empty."""
    return any(len(text) < len(tag) and tag.startswith(text) for tag in tags)
