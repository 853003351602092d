"""What scanners of calls with named arguments share."""

from __future__ import annotations

import json
from collections.abc import Callable

from flare_ray.frontend.parsers.verdicts import Malformed, ParsedCall

Stage = Callable[[str], ParsedCall | Malformed | None]
"""Takes the whole text; moves `_at` or the stage, or gives the verdict, or waits for more text."""


class StagedScanner:
    """A scanner that goes through stages, each from where the one before it stopped.

    Args:
        first: its first stage.
    """

    def __init__(self, first: Stage) -> None:
        self._stage = first
        self._at = 0
        self._search = 0
        self._name = ""
        self._key = ""
        self._arguments: dict[str, str] = {}

    def scan(self, text: str) -> ParsedCall | Malformed | None:
        """See `CallScanner.scan`."""
        while True:
            at, stage = self._at, self._stage
            result = stage(text)
            if result is not None:
                return result
            if self._at == at and self._stage == stage:
                return None

    def _value(self, text: str, closing: str) -> str | None:
        """The text up to `closing`, behind which it moves; None while that is missing."""
        at = text.find(closing, self._search)
        if at < 0:
            self._search = max(self._at, len(text) - len(closing) + 1)
            return None
        raw = text[self._at : at]
        self._at = at + len(closing)
        return raw

    def _call(self, end: int) -> ParsedCall:
        """The call with the arguments so far, whose values are JSON."""
        pairs = (f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in self._arguments.items())
        return ParsedCall(self._name, "{" + ", ".join(pairs) + "}", end)
