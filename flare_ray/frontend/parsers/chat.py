"""Splits generated text into reasoning, content and tool calls, whatever pieces it arrives in.

States and what ends them (R = reasoning, C = content, T = inside a tool call):

    start  -- reasoning_open --> R      only as the first thing, and only if the prompt has not
           -- other text    --> C       already opened reasoning (then the first state is R)
    R      -- reasoning_close --> C
    R, C   -- tool_open --> T           a call inside reasoning ends it
    T      -- the call is complete --> C, one `ToolCall`
    T      -- it cannot become a call, or the answer ends --> R or C, whence it came: its text, tag
              included, is reasoning or content like what stood before it

Tags around a run of calls (B, where the family has them) are layout, like the white space before
the first and between the calls: B opens where a call follows, and closes where its tag stands.

A call is handed out when it is complete, since text that turns out not to be a call must reach the
client as content. In parts it is handed out where a client asked for a stream: from the first
argument on of which some value is certain, if the call stands outside reasoning (where models quote
their tags) and names a declared function; any other one comes as a whole, in the same events. What
has begun cannot be taken back: if the call breaks off, its arguments end where they are, so that no
client can make half a call, and the text behind them is content.

Nothing is ever lost: the pieces of the three kinds, tags and call syntax apart, add up to the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from flare_ray.frontend.parsers.calls import CallScanner, scanner_for
from flare_ray.frontend.parsers.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    ReasoningText,
    ToolCall,
    append_event,
)
from flare_ray.frontend.parsers.text import could_begin, find_first, held_back
from flare_ray.frontend.parsers.verdicts import ParsedCall
from flare_ray.recipes.declaration import ChatFormat


class _State(Enum):
    START = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    BLOCK = auto()


class ChatParser:
    """Parser of one answer.

    Args:
        chat: the family's tags.
        tools: parameter schema (JSON schema, maybe empty) by function name; None = calls are not
            looked for, their text is content.
        inside_reasoning: the prompt already opened reasoning.
        data_answer: content is one document that may quote tags: calls are looked for only in front
            of it.
        in_parts: calls come as `CallStart`, `CallArguments`, `CallEnd` instead of `ToolCall`.
        traced: keep where in the whole text the letters stood that were handed out as text.
    Attributes:
        num_calls: complete calls so far.
    """

    def __init__(
        self,
        chat: ChatFormat,
        *,
        tools: Mapping[str, Mapping[str, Any]] | None,
        inside_reasoning: bool,
        data_answer: bool = False,
        in_parts: bool = False,
        traced: bool = False,
    ) -> None:
        self._chat = chat
        self._fed = 0
        self._shown: list[tuple[int, int]] | None = [] if traced else None
        self._scan_calls = tools is not None and bool(chat.tool_open)
        self._tools = tools or {}
        self._buffer = ""
        tags = (chat.reasoning_close, chat.tool_open, chat.tool_block_open)
        self._tag_letters = frozenset(tag[0] for tag in tags if tag)
        self._scanner: CallScanner | None = None
        self._layout = ""
        self._before_calls = _State.CONTENT
        self._in_parts = in_parts
        self._told = 0
        self._begun_calls = 0
        self.num_calls = 0
        self._data_answer = data_answer
        if inside_reasoning:
            self._state = _State.REASONING
        else:
            self._state = _State.START if chat.reasoning_open else _State.CONTENT

    @property
    def outside_reasoning(self) -> bool:
        """Whether the next letter cannot turn out to belong to reasoning that has begun."""
        return self._state is _State.CONTENT or not (self.in_reasoning or self.undecided)

    @property
    def in_reasoning(self) -> bool:
        """Whether the next letter belongs to reasoning, its closing tag included."""
        return self._state is _State.REASONING

    @property
    def undecided(self) -> bool:
        """Whether the next letter belongs to reasoning or to a call, whichever turns out."""
        calls = self._state in (_State.CALL, _State.BLOCK)
        return calls and self._before_calls is _State.REASONING

    def feed(self, text: str) -> list[ChatEvent]:
        """Events that `text` completes; neighbouring text of one kind is joined."""
        self._fed += len(text)
        if not self._buffer and (plain := self._plain(text)) is not None:
            if self._shown is not None:
                self._trace(len(text), 0)
            return [plain]
        events: list[ChatEvent] = []
        self._buffer += text
        while self._step(events):
            pass
        return events

    def _plain(self, text: str) -> ContentText | ReasoningText | None:
        """The whole of a piece in which no tag can begin, as nearly every one; else None."""
        if self._data_answer or not text:
            return None
        for letter in self._tag_letters:
            if letter in text:
                return None
        if self._state is _State.CONTENT:
            return ContentText(text)
        return ReasoningText(text) if self._state is _State.REASONING else None

    def take_shown(self) -> list[tuple[int, int]]:
        """Places in the whole text, (first letter, behind the last), whose letters the events of
        reasoning and content since the last call consist of, in their order; of a traced parser."""
        assert self._shown is not None
        shown, self._shown = self._shown, []
        return shown

    def finish(self) -> list[ChatEvent]:
        """Events for what was held back; an unfinished call becomes text again."""
        events: list[ChatEvent] = []
        text = self._buffer
        if self._state is _State.CALL:
            text = self._lost_call(events, len(text), last=True)
        elif self._state is _State.BLOCK:
            text = self._layout + text
            self._state = self._before_calls
        self._buffer = ""
        self._emit(events, text, 0)
        return events

    def _step(self, events: list[ChatEvent]) -> bool:
        """Advance by one transition; False when more text is needed."""
        if self._state is _State.START:
            return self._leave_start()
        if self._state is _State.CALL:
            return self._scan_call(events)
        if self._state is _State.BLOCK:
            return self._scan_block(events)
        self._leave_calls()
        tags = self._watched()
        at, tag = find_first(self._buffer, tags)
        if at < 0:
            keep = held_back(self._buffer, tags)
            cut = len(self._buffer) - keep
            self._emit(events, self._buffer[:cut], cut)
            self._buffer = self._buffer[cut:]
            return False
        self._emit(events, self._buffer[:at], at)
        self._buffer = self._buffer[at + len(tag) :]
        if tag == self._chat.tool_block_open and self._scan_calls and tag:
            self._before_calls, self._state = self._state, _State.BLOCK
            self._layout = tag
        elif tag == self._chat.tool_open and self._scan_calls:
            self._before_calls, self._state = self._state, _State.CALL
            self._scanner = scanner_for(self._chat, self._tools)
        else:
            self._state = _State.CONTENT
        return True

    def _scan_block(self, events: list[ChatEvent]) -> bool:
        """A call, or the end of the run; anything else means that this is no run of calls."""
        chat, rest = self._chat, self._buffer.lstrip()
        if rest.startswith(chat.tool_open):
            self._layout += self._buffer[: len(self._buffer) - len(rest)]
            self._buffer = rest[len(chat.tool_open) :]
            self._state = _State.CALL
            self._scanner = scanner_for(chat, self._tools)
            return True
        if rest.startswith(chat.tool_block_close) and not self._layout:
            self._buffer = rest[len(chat.tool_block_close) :]
            self._state = _State.CONTENT
            return True
        if could_begin(rest, (chat.tool_open, chat.tool_block_close)):
            return False
        self._state = self._before_calls
        self._emit(events, self._layout, 0)
        self._layout = ""
        return True

    def _leave_calls(self) -> None:
        """Once a document has begun, nothing in it is a call."""
        if not self._data_answer or self._state is not _State.CONTENT:
            return
        begun = self._buffer.lstrip()
        opening = tuple(filter(None, (self._chat.tool_open, self._chat.tool_block_open)))
        if begun and not begun.startswith(opening) and not could_begin(begun, opening):
            self._scan_calls = False

    def _leave_start(self) -> bool:
        """Decide whether the answer opens with reasoning; white space before the tag is layout."""
        stripped = self._buffer.lstrip()
        opening = self._chat.reasoning_open
        if stripped.startswith(opening):
            self._buffer = stripped[len(opening) :]
            self._state = _State.REASONING
            return True
        if could_begin(stripped, (opening,)):
            return False
        self._state = _State.CONTENT
        return True

    def _scan_call(self, events: list[ChatEvent]) -> bool:
        assert self._scanner is not None
        result = self._scanner.scan(self._buffer)
        if result is None:
            self._take(events)
            return False
        if isinstance(result, ParsedCall):
            self._end_call(events, result)
            self.num_calls += 1
            self._before_calls = _State.CONTENT
            self._state = _State.BLOCK if self._chat.tool_block_open else _State.CONTENT
        else:
            self._emit(events, self._lost_call(events, result.end), result.end)
        self._layout = ""
        self._buffer = self._buffer[result.end :]
        self._scanner = None
        return True

    def _take(self, events: list[ChatEvent], *, last: bool = False) -> None:
        """Hand out what is certain of the present call's arguments."""
        scanner = self._scanner
        assert scanner is not None
        if not self._in_parts or self._before_calls is not _State.CONTENT:
            return
        if scanner.name not in self._tools:
            return
        text = scanner.take(self._buffer, last=last)
        if text and not self._told:
            append_event(events, CallStart(self._begun_calls, scanner.name))
        append_event(events, CallArguments(self._begun_calls, text))
        self._told += len(text)

    def _end_call(self, events: list[ChatEvent], call: ParsedCall) -> None:
        """Hand out the rest of a complete call."""
        index, told = self._begun_calls, self._told
        self._begun_calls, self._told = index + 1, 0
        if not self._in_parts:
            append_event(events, ToolCall(index, call.name, call.arguments))
            return
        if not told:
            append_event(events, CallStart(index, call.name))
        append_event(events, CallArguments(index, call.arguments[told:]))
        append_event(events, CallEnd(index, complete=True))

    def _lost_call(self, events: list[ChatEvent], end: int, *, last: bool = False) -> str:
        """What of the buffer before `end` is text after all: the call came to nothing."""
        assert self._scanner is not None
        self._take(events, last=last)
        self._state = self._before_calls
        if not self._told:
            return self._layout + self._chat.tool_open + self._buffer[:end]
        append_event(events, CallEnd(self._begun_calls, complete=False))
        self._begun_calls, self._told = self._begun_calls + 1, 0
        return self._buffer[self._scanner.told : end]

    def _watched(self) -> tuple[str, ...]:
        chat = self._chat
        closing = chat.reasoning_close if self._state is _State.REASONING else ""
        # where calls come in runs, only a run opens one
        opening = (chat.tool_block_open or chat.tool_open) if self._scan_calls else ""
        return tuple(filter(None, (closing, opening)))

    def _emit(self, events: list[ChatEvent], text: str, end: int) -> None:
        """Hand out text whose last letter stands in front of place `end` of the buffer."""
        self._trace(len(text), end)
        kind = ReasoningText if self._state is _State.REASONING else ContentText
        append_event(events, kind(text))

    def _trace(self, letters: int, end: int) -> None:
        if self._shown is not None and letters:
            behind = self._fed - len(self._buffer) + end
            self._shown.append((behind - letters, behind))
