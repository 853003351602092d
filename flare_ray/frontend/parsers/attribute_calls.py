"""One tool call in the "attributes" style, scanned while it arrives (see `calls`)."""

from __future__ import annotations

import json
import re

from flare_ray.frontend.parsers.stages import StagedScanner
from flare_ray.frontend.parsers.text import could_begin
from flare_ray.frontend.parsers.values import INVALID_JSON, strict_json
from flare_ray.frontend.parsers.verdicts import FUNCTION_NAME, Malformed, ParsedCall
from flare_ray.recipes.declaration import ChatFormat

CALL_HEAD = re.compile(r'\s+name="([^"]*)"\s*(/?)>')
ARGUMENT_HEAD = re.compile(r'\s+name="([^"]+)"\s+string="(true|false)"\s*>')
LONGEST_HEAD = 512
"""Letters in which the opening tag of a call or an argument must end."""


class AttributesScanner(StagedScanner):
    """` name="f">`, arguments, and the closing tag; a call without arguments may end in `/>`.

    An argument is `arg_key_open name="key" string="true">value arg_value_close`. Its value runs to
    the closing tag and may hold anything else; with string="true" it is taken raw, else it is JSON
    (and a string after all where it is none). White space between tags is layout. A key given twice
    makes the call malformed.
    """

    def __init__(self, chat: ChatFormat) -> None:
        super().__init__(self._scan_name)
        self._chat = chat
        self._raw = True

    def _head(self, text: str, form: re.Pattern[str]) -> re.Match[str] | Malformed | None:
        """The opening tag's attributes, from where it stands to its end."""
        end = text.find(">", self._at, self._at + LONGEST_HEAD)
        if end < 0:
            return None if len(text) < self._at + LONGEST_HEAD else Malformed(self._at)
        match = form.fullmatch(text, self._at, end + 1)
        return Malformed(self._at) if match is None else match

    def _scan_name(self, text: str) -> ParsedCall | Malformed | None:
        head = self._head(text, CALL_HEAD)
        if head is None or isinstance(head, Malformed):
            return head
        name = head.group(1)
        if FUNCTION_NAME.fullmatch(name) is None:
            return Malformed(self._at)
        self.name = name
        if head.group(2):
            return ParsedCall(name, "{}", head.end())
        self._at = head.end()
        self._stage = self._scan_next
        return None

    def _scan_next(self, text: str) -> ParsedCall | Malformed | None:
        """An argument or the end of the call, after optional white space."""
        opening, closing = self._chat.arg_key_open, self._chat.tool_close
        rest = text[self._at :].lstrip()
        start = len(text) - len(rest)
        if rest.startswith(closing):
            return self._call(start + len(closing))
        if rest.startswith(opening):
            self._at = start + len(opening)
            self._stage = self._scan_key
            return None
        return None if could_begin(rest, (opening, closing)) else Malformed(start)

    def _scan_key(self, text: str) -> Malformed | None:
        head = self._head(text, ARGUMENT_HEAD)
        if head is None or isinstance(head, Malformed):
            return head
        self._key, self._raw = head.group(1), head.group(2) == "true"
        if self._key in self._arguments:
            return Malformed(self._at)
        self._begin_value(head.end(), self._chat.arg_value_close, grows=self._raw)
        self._stage = self._scan_value
        return None

    def _scan_value(self, text: str) -> None:
        raw = self._value(text, self._chat.arg_value_close)
        if raw is None:
            return
        if self._raw or strict_json(raw) is INVALID_JSON:
            self._end_value(raw, json.dumps(raw, ensure_ascii=False))
        else:
            self._end_value(raw, raw.strip())
        self._stage = self._scan_next
