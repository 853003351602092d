"""What a scanner of tool calls answers."""

from __future__ import annotations

import re
from dataclasses import dataclass

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
"""Names a call may carry. Requests may declare fewer (OpenAI's 64 letters, digits, _ and -)."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete call; `end` is the position after the closing tag."""

    name: str
    arguments: str
    end: int


@dataclass(frozen=True, slots=True)
class Malformed:
    """Not a call. Everything before `end` is content; parsing goes on there."""

    end: int
