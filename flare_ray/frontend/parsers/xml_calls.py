"""One tool call in the "xml_parameters" style, scanned while it arrives (see `calls`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flare_ray.frontend.parsers.stages import StagedScanner
from flare_ray.frontend.parsers.text import could_begin
from flare_ray.frontend.parsers.values import argument_json, takes_only_strings
from flare_ray.frontend.parsers.verdicts import FUNCTION_NAME, Malformed, ParsedCall

FUNCTION_OPEN, FUNCTION_CLOSE = "<function=", "</function>"
PARAMETER_OPEN, PARAMETER_CLOSE = "<parameter=", "</parameter>"
PARAMETER_NAME = re.compile(r"[^<>\n]+")


class XmlParametersScanner(StagedScanner):
    """`<function=name><parameter=key>value</parameter>...</function>` up to the closing tag.

    White space between tags is layout, and so is one line break at either end of a value. A value
    runs to its closing tag and may hold anything else, other tags included; a string is taken raw,
    other types are JSON (`values.argument_json`). A key given twice makes the call malformed.
    """

    _layout = "\n"

    def __init__(self, tool_close: str, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(self._scan_function)
        self._close = tool_close
        self._tools = tools

    def _scan_function(self, text: str) -> Malformed | None:
        end = self._after(text, FUNCTION_OPEN)
        if isinstance(end, Malformed) or end is None:
            return end
        name = self._named(text, end, FUNCTION_NAME)
        if isinstance(name, str):
            self.name = name
            self._stage = self._scan_next
            return None
        return name

    def _scan_next(self, text: str) -> Malformed | None:
        """A parameter or the end of the function."""
        end = self._after(text, PARAMETER_OPEN, FUNCTION_CLOSE)
        if isinstance(end, Malformed) or end is None:
            return end
        if text.startswith(FUNCTION_CLOSE, end - len(FUNCTION_CLOSE)):
            self._at = end
            self._stage = self._scan_end
            return None
        key = self._named(text, end, PARAMETER_NAME)
        if not isinstance(key, str):
            return key
        if key in self._arguments:
            return Malformed(self._at)
        self._key = key
        grows = takes_only_strings(self._tools.get(self.name, {}), key)
        self._begin_value(self._at, PARAMETER_CLOSE, grows=grows)
        self._stage = self._scan_value
        return None

    def _scan_value(self, text: str) -> None:
        raw = self._value(text, PARAMETER_CLOSE)
        if raw is None:
            return
        self._end_value(raw, argument_json(raw, self._tools.get(self.name, {}), self._key))
        self._stage = self._scan_next

    def _scan_end(self, text: str) -> ParsedCall | Malformed | None:
        end = self._after(text, self._close)
        if isinstance(end, Malformed) or end is None:
            return end
        return self._call(end)

    def _after(self, text: str, *tags: str) -> int | Malformed | None:
        """Position behind the tag that comes next, after optional white space."""
        rest = text[self._at :].lstrip()
        start = len(text) - len(rest)
        for tag in tags:
            if rest.startswith(tag):
                return start + len(tag)
        return None if could_begin(rest, tags) else Malformed(start)

    def _named(self, text: str, start: int, pattern: re.Pattern[str]) -> str | Malformed | None:
        """The name from `start` to its `>`; moves behind it."""
        match = pattern.match(text, start)
        end = start if match is None else match.end()
        if end == len(text):
            return None
        if match is None or text[end] != ">":
            return Malformed(end)
        self._at = end + 1
        return match.group()
