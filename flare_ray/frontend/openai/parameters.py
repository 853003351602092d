"""The closed set of request parameters: what works, what is refused by name, what is unknown.

A parameter that no issue has built yet is refused unless it carries the value that asks for
nothing (design/architecture.md section 9): no parameter is accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flare_ray.errors import InvalidRequest

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "verbosity": (),
    "web_search_options": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "safety_identifier": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "truncate_prompt_tokens": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "documents": ([],),
    "chat_template": (),
}
"""Parameters that are not built, and the values besides null that ask for nothing."""


def drop_neutral(body: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """The part of `body` that a request model reads.

    Args:
        known: fields of the request model.
    Raises:
        InvalidRequest: a parameter is unknown, or is not built and asks for something.
    """
    known = frozenset(known)
    kept: dict[str, Any] = {}
    unknown = sorted(name for name in body if name not in known and name not in NEUTRAL)
    if unknown:
        raise InvalidRequest(
            f"unknown parameter{'s' if len(unknown) > 1 else ''}: "
            f"{', '.join(_shown(name) for name in unknown)}; leave it out",
            param=unknown[0][:100],
            code="unknown_parameter",
        )
    for name, value in body.items():
        if name in known:
            kept[name] = value
        elif value is not None and not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            raise InvalidRequest(
                f"{name} is not supported by this server; leave it out{_alternatives(name)} "
                f"(got {_shown(value)})",
                param=name,
                code="unsupported_parameter",
            )
    return kept


def _alternatives(name: str) -> str:
    values = NEUTRAL[name]
    return f" or send {' or '.join(_shown(value) for value in values)}" if values else ""


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells true from 1, and takes 0.0 for 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
