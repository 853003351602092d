"""What an HTTP replica tells the router about a request, and how its engine was chosen."""

from __future__ import annotations

import enum

import msgspec


class Choice(enum.StrEnum):
    """Why a request went to its engine."""

    KNOWN = "known"
    """The engine served the same session, or the longest known part of this prompt, before."""
    HOME = "home"
    """Nothing is known: the engine to which the prompt's beginning, or the session, hashes."""
    GUARD = "guard"
    """Its own engine had too many open requests or did not say how many: the less loaded of two."""
    LOAD = "load"
    """Neither session nor a whole page of prompt: the less loaded of two."""


class Route(msgspec.Struct, kw_only=True):
    """Where a request belongs. The router fills in `choice`, which the engine counts, and `asked`.

    Attributes:
        keys: digests under which its engine may be known, the least specific first: of the first 1,
            2, .. whole pages of its prompt, or of its session alone; () = none.
        home: the digest that names an engine while none is known; b"" = none.
        choice: how its engine was chosen; None until it is.
        asked: how often Serve has asked for an engine.
    """

    keys: tuple[bytes, ...] = ()
    home: bytes = b""
    choice: Choice | None = None
    asked: int = 0
