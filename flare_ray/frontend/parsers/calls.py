"""One tool call, scanned while it arrives: the scanner of each style.

A scanner is given everything after the opening tag, again and again as it grows, and remembers how
far it has come, so that the work is linear in the text. It answers None (more text is needed),
`ParsedCall`, or `Malformed` with the position from which ordinary parsing goes on. The verdict
depends on the text alone, never on how it was cut into pieces; and so do the parts that are taken
meanwhile, joined.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from flare_ray.frontend.parsers.attribute_calls import AttributesScanner
from flare_ray.frontend.parsers.stages import StagedScanner
from flare_ray.frontend.parsers.text import could_begin, find_first
from flare_ray.frontend.parsers.values import argument_json, strict_json, takes_only_strings
from flare_ray.frontend.parsers.verdicts import FUNCTION_NAME, Malformed, ParsedCall
from flare_ray.frontend.parsers.xml_calls import XmlParametersScanner
from flare_ray.recipes.declaration import ChatFormat


class CallScanner(Protocol):
    """Scanner of one call. `name` and `told` as in `StagedScanner`."""

    name: str
    told: int

    def scan(self, text: str) -> ParsedCall | Malformed | None:
        """The verdict on `text`, which extends the text of the previous call of this method."""

    def take(self, text: str, *, last: bool = False) -> str:
        """Arguments in parts, see `StagedScanner.take`."""


def scanner_for(chat: ChatFormat, tools: Mapping[str, Mapping[str, Any]]) -> CallScanner:
    """The scanner of the family's style."""
    if chat.tool_style == "arg_pairs":
        return ArgPairsScanner(chat, tools)
    if chat.tool_style == "attributes":
        return AttributesScanner(chat)
    if chat.tool_style == "xml_parameters":
        return XmlParametersScanner(chat.tool_close, tools)
    return JsonScanner(chat)


class ArgPairsScanner(StagedScanner):
    """`name<arg_key>k</arg_key><arg_value>v</arg_value>...` up to the closing tag.

    White space around the name and between pairs is layout. A value runs to its closing tag and may
    hold anything else, other tags included; a string is taken raw, other types are JSON
    (`values.argument_json`). A key given twice makes the call malformed.
    """

    def __init__(self, chat: ChatFormat, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(self._scan_name)
        self._chat = chat
        self._tools = tools

    def _scan_name(self, text: str) -> ParsedCall | Malformed | None:
        tags = (self._chat.arg_key_open, self._chat.tool_close)
        start = len(text) - len(text.lstrip())
        match = FUNCTION_NAME.match(text, start)
        if match is None:
            return None if start == len(text) else Malformed(start)
        after = match.end()
        rest = text[after:].lstrip()
        if not rest:
            # A longer name may still follow unless white space already ended this one.
            return None
        if any(rest.startswith(tag) for tag in tags):
            self.name = match.group()
            self._at = len(text) - len(rest)
            self._stage = self._scan_next
            return None
        return None if could_begin(rest, tags) else Malformed(len(text) - len(rest))

    def _scan_next(self, text: str) -> ParsedCall | Malformed | None:
        """A pair or the end of the call, after optional white space."""
        rest = text[self._at :].lstrip()
        start = len(text) - len(rest)
        if rest.startswith(self._chat.tool_close):
            return self._call(start + len(self._chat.tool_close))
        if rest.startswith(self._chat.arg_key_open):
            self._at = start + len(self._chat.arg_key_open)
            self._stage = self._scan_key
            return None
        if could_begin(rest, (self._chat.tool_close, self._chat.arg_key_open)):
            return None
        return Malformed(start)

    def _scan_key(self, text: str) -> Malformed | None:
        # A key that runs into another tag was never closed; waiting for its end would hold back
        # everything that follows.
        chat = self._chat
        others = (chat.arg_key_open, chat.arg_value_open, chat.arg_value_close)
        ends = (chat.arg_key_close, chat.tool_open, chat.tool_close, *others)
        at, tag = find_first(text, ends, self._at)
        if at < 0:
            return None
        key = text[self._at : at].strip()
        if tag != chat.arg_key_close or not key or key in self._arguments:
            return Malformed(at)
        self._key = key
        self._at = at + len(tag)
        self._stage = self._scan_gap
        return None

    def _scan_gap(self, text: str) -> Malformed | None:
        rest = text[self._at :].lstrip()
        start = len(text) - len(rest)
        opening = self._chat.arg_value_open
        if rest.startswith(opening):
            grows = takes_only_strings(self._tools.get(self.name, {}), self._key)
            self._begin_value(start + len(opening), self._chat.arg_value_close, grows=grows)
            self._stage = self._scan_value
            return None
        return None if could_begin(rest, (opening,)) else Malformed(start)

    def _scan_value(self, text: str) -> None:
        raw = self._value(text, self._chat.arg_value_close)
        if raw is None:
            return
        self._end_value(raw, argument_json(raw, self._tools.get(self.name, {}), self._key))
        self._stage = self._scan_next


class JsonScanner:
    """One JSON object `{"name": ..., "arguments": {...}}` up to the closing tag.

    Its arguments come whole: their name may stand behind them.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self.name = ""
        self.told = 0
        self._close = chat.tool_close
        self._search = 0

    def scan(self, text: str) -> ParsedCall | Malformed | None:
        """See `CallScanner.scan`."""
        opening = text.lstrip()
        if opening and not opening.startswith("{"):
            return Malformed(len(text) - len(opening))
        while (at := text.find(self._close, self._search)) >= 0:
            call = self._parse(text[:at], at + len(self._close))
            if call is not None:
                return call
            if not _ends_inside_string(text[:at]):
                return Malformed(at)
            # The tag stands inside a JSON string: an argument that quotes it.
            self._search = at + len(self._close)
        self._search = max(self._search, len(text) - len(self._close) + 1, 0)
        return None

    def take(self, text: str, *, last: bool = False) -> str:
        """See `CallScanner.take`."""
        return ""

    def _parse(self, body: str, end: int) -> ParsedCall | None:
        call = strict_json(body)
        if not isinstance(call, dict) or set(call) - {"name", "arguments"}:
            return None
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or FUNCTION_NAME.fullmatch(name) is None:
            return None
        if not isinstance(arguments, dict):
            return None
        return ParsedCall(name, json.dumps(arguments, ensure_ascii=False), end)


def _ends_inside_string(text: str) -> bool:
    """Whether JSON text stops in the middle of a string."""
    inside = escaped = False
    for letter in text:
        if escaped:
            escaped = False
        elif inside and letter == "\\":
            escaped = True
        elif letter == '"':
            inside = not inside
    return inside
