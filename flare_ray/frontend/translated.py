"""Refusals of a chat request in the words of the API that was translated into it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from flare_ray.errors import InvalidRequest

Result = TypeVar("Result")


async def in_words_of(names: Mapping[str, str], work: Awaitable[Result]) -> Result:
    """`work`, whose refusals name fields of another API.

    Args:
        names: chat parameter -> field of that API. A key with a leading dot is part of a path.
    Raises:
        InvalidRequest: as `work` does.
    """
    try:
        return await work
    except InvalidRequest as error:
        raise _renamed(error, names) from error


def _renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    old = error.param
    if old is None:
        return error
    new = names.get(old, old)
    for part, replacement in names.items():
        if part.startswith("."):
            new = new.replace(part, replacement)
    # A function of a chat request stands one level deeper.
    new = re.sub(r"^(tools\[\d+\])\.function\b", r"\1", new)
    message = re.sub(rf"(?<![\w.]){re.escape(old)}(?!\w)", lambda _: new, str(error), count=1)
    return InvalidRequest(message, param=new, code=error.code, status=error.status)
