"""Streaming parsers of generated chat text, driven by a recipe's `ChatFormat`."""

from flare_ray.frontend.parsers.chat import ChatParser
from flare_ray.frontend.parsers.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    ReasoningText,
    ToolCall,
)

__all__ = [
    "CallArguments",
    "CallEnd",
    "CallStart",
    "ChatEvent",
    "ChatParser",
    "ContentText",
    "ReasoningText",
    "ToolCall",
]
