"""What a parser hands out: pieces of reasoning, pieces of content, calls whole or in parts."""

from __future__ import annotations

import msgspec


class ReasoningText(msgspec.Struct, frozen=True, gc=False):
    """A piece of reasoning."""

    text: str


class ContentText(msgspec.Struct, frozen=True, gc=False):
    """A piece of the visible answer."""

    text: str


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """One complete call.

    Attributes:
        index: position among the calls of this answer, from 0.
        arguments: JSON text of one object.
    """

    index: int
    name: str
    arguments: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """A call whose arguments follow in parts; `index` as in `ToolCall`."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of its arguments: the texts add up to what `ToolCall.arguments` would be."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """Nothing of it follows.

    Attributes:
        complete: False = it broke off: its arguments are no JSON, and it is no call to be made.
    """

    index: int
    complete: bool


ChatEvent = ReasoningText | ContentText | ToolCall | CallStart | CallArguments | CallEnd


def append_event(events: list[ChatEvent], event: ChatEvent) -> None:
    """Append, joining neighbouring text of one kind; empty text is dropped."""
    if isinstance(event, ToolCall | CallStart | CallEnd):
        events.append(event)
        return
    if not event.text:
        return
    last = events[-1] if events else None
    if isinstance(event, ContentText) and isinstance(last, ContentText):
        events[-1] = ContentText(last.text + event.text)
    elif isinstance(event, ReasoningText) and isinstance(last, ReasoningText):
        events[-1] = ReasoningText(last.text + event.text)
    elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
        events[-1] = CallArguments(event.index, last.text + event.text)
    else:
        events.append(event)
