"""What a parser hands out: pieces of reasoning, pieces of content, whole tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """A piece of the visible answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call.

    Attributes:
        index: position among the calls of this answer, from 0.
        arguments: JSON text of one object.
    """

    index: int
    name: str
    arguments: str


ChatEvent = ReasoningText | ContentText | ToolCall


def append_event(events: list[ChatEvent], event: ChatEvent) -> None:
    """Append, joining neighbouring text of one kind; empty text is dropped."""
    if isinstance(event, ToolCall):
        events.append(event)
        return
    if not event.text:
        return
    last = events[-1] if events else None
    if isinstance(event, ContentText) and isinstance(last, ContentText):
        events[-1] = ContentText(last.text + event.text)
    elif isinstance(event, ReasoningText) and isinstance(last, ReasoningText):
        events[-1] = ReasoningText(last.text + event.text)
    else:
        events.append(event)
