"""What scanners of calls with named arguments share."""

from __future__ import annotations

import json
from collections.abc import Callable

from flare_ray.frontend.parsers.text import held_back
from flare_ray.frontend.parsers.verdicts import Malformed, ParsedCall

Stage = Callable[[str], ParsedCall | Malformed | None]
"""Takes the whole text; moves `_at` or the stage, or gives the verdict, or waits for more text."""


class StagedScanner:
    """A scanner that goes through stages, each from where the one before it stopped.

    Its arguments can also be taken in parts. A value that is certain to be a string grows letter by
    letter, whatever may still begin its closing tag held back; any other one comes when it is
    complete, since what its JSON is depends on the whole.

    Args:
        first: its first stage.
    Attributes:
        name: of the function; "" until it is known.
        told: position in the text up to which everything is in what was taken.
    """

    _layout = ""
    """What may stand once at either end of a value without being part of it."""

    def __init__(self, first: Stage) -> None:
        self.name = ""
        self.told = 0
        self._stage = first
        self._at = 0
        self._search = 0
        self._key = ""
        self._arguments: dict[str, str] = {}
        self._ready = ""
        self._closings: tuple[str, ...] = ()
        self._grown = -1

    def scan(self, text: str) -> ParsedCall | Malformed | None:
        """See `CallScanner.scan`."""
        while True:
            at, stage = self._at, self._stage
            result = stage(text)
            if result is not None:
                return result
            if self._at == at and self._stage == stage:
                return None

    def take(self, text: str, *, last: bool = False) -> str:
        """Arguments that are certain and were not taken yet, as a part of the call's JSON.

        Args:
            text: as last scanned.
            last: nothing follows, so nothing is held back.
        """
        if self._closings:
            self._grow(text, last=last)
        ready, self._ready = self._ready, ""
        return ready

    def _grow(self, text: str, *, last: bool) -> None:
        start = self._at
        if self._layout and text.startswith(self._layout, start):
            start += len(self._layout)
        end = len(text) - (0 if last else held_back(text, self._closings))
        piece = text[start + max(self._grown, 0) : end]
        if not piece:
            return
        if self._grown < 0:
            self._ready += self._lead() + '"'
            self._grown = 0
        self._ready += _quoted(piece)[1:-1]
        self._grown += len(piece)
        self.told = end

    def _lead(self) -> str:
        """What stands in front of the present argument's value."""
        return ("{" if not self._arguments else ", ") + _quoted(self._key) + ": "

    def _begin_value(self, at: int, closing: str, *, grows: bool) -> None:
        """A value begins at `at`; it may be taken as it grows if it is certain to be a string."""
        self._at = self._search = at
        if grows:
            self._closings = (self._layout + closing, closing)

    def _value(self, text: str, closing: str) -> str | None:
        """The text up to `closing`, behind which it moves; None while that is missing."""
        at = text.find(closing, self._search)
        if at < 0:
            self._search = max(self._at, len(text) - len(closing) + 1)
            return None
        raw = text[self._at : at]
        self._at = at + len(closing)
        return raw.removeprefix(self._layout).removesuffix(self._layout)

    def _end_value(self, raw: str, value: str) -> None:
        """The present argument is complete: its text, and its JSON."""
        if self._grown < 0:
            self._ready += self._lead() + value
        else:
            self._ready += _quoted(raw[self._grown :])[1:]
        self._arguments[self._key] = value
        self._closings, self._grown = (), -1
        self.told = self._at

    def _call(self, end: int) -> ParsedCall:
        """The call with the arguments so far, whose values are JSON."""
        pairs = (f"{_quoted(key)}: {value}" for key, value in self._arguments.items())
        return ParsedCall(self.name, "{" + ", ".join(pairs) + "}", end)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
