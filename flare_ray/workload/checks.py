"""Whether an answer is right, from the answer's text alone: nothing of it is executed.

Verdicts are about the served answer, not about speed: two arms that draw the same tokens get equal
verdicts, and an arm that ended early or lost tokens shows here (contract: B1, B3).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from flare_ray.errors import ConfigError
from flare_ray.workload.items import Answer, Check, Expectation

_FENCE = re.compile(r"```[\w+-]*\n(.*?)(?:```|\Z)", re.S)
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


class Verdict(msgspec.Struct, frozen=True):
    """Outcome of a check.

    Attributes:
        right: None where nothing was expected.
        reason: why it is wrong; "" otherwise.
    """

    right: bool | None
    reason: str = ""


def check(expected: Expectation, answer: Answer) -> Verdict:
    """Compare an answer with what was expected.

    Raises:
        ConfigError: the expectation's value does not fit its kind; the workload is broken.
    """
    if expected.check == "none":
        return Verdict(None)
    reason = _CHECKS[expected.check](expected.value, answer)
    return Verdict(not reason, reason)


def _exact(value: Any, answer: Answer) -> str:
    wanted, found = _words(_text(value, "exact")), _words(answer.content)
    return "" if wanted == found else f"expected {_short(wanted)}, got {_short(found)}"


def _contains(value: Any, answer: Answer) -> str:
    wanted = value if isinstance(value, list | tuple) else [value]
    text = answer.content.casefold()
    missing = [one for one in wanted if _text(one, "contains").casefold() not in text]
    return f"lacks {missing[0]!r}" if missing else ""


def _json(value: Any, answer: Answer) -> str:
    text = fenced(answer.content) or answer.content
    try:
        found = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    # 1 and 1.0 are one number in JSON; True is none.
    wanted, got = (json.dumps(_numbers(one), sort_keys=True) for one in (value, found))
    return "" if wanted == got else f"expected {_short(wanted)}, got {_short(got)}"


def _calls(value: Any, answer: Answer) -> str:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"check calls needs a list of calls, got {value!r}")
    wanted = [(call["name"], _numbers(call["arguments"])) for call in value]
    found = [(call.name, _numbers(call.arguments)) for call in answer.calls]
    return "" if wanted == found else f"expected {_short(str(wanted))}, got {_short(str(found))}"


def _code(value: Any, answer: Answer) -> str:
    text = fenced(answer.content)
    if text is None:
        return "no fenced code"
    try:
        found = ast.dump(ast.parse(text))
    except (SyntaxError, ValueError) as error:
        return f"no Python: {error}"
    if found != ast.dump(ast.parse(_text(value, "code"))):
        return "another syntax tree"
    wanted_notes, found_notes = _comments(_text(value, "code")), _comments(text)
    return "" if wanted_notes == found_notes else "other comments"


def _number(value: Any, answer: Answer) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"check number needs a number, got {value!r}")
    found = _NUMBER.findall(answer.content)
    if not found:
        return "no number"
    last = float(found[-1].replace(",", ""))
    return "" if last == value else f"expected {value}, got {last:g}"


_CHECKS: Mapping[Check, Callable[[Any, Answer], str]] = {
    "exact": _exact,
    "contains": _contains,
    "json": _json,
    "calls": _calls,
    "code": _code,
    "number": _number,
}


def fenced(text: str) -> str | None:
    """Content of the first fenced block, which may be unclosed; None without one."""
    found = _FENCE.search(text)
    return found.group(1) if found else None


def _comments(source: str) -> list[str]:
    """Whole-line comments, which a syntax tree does not hold."""
    return [line.strip() for line in source.splitlines() if line.lstrip().startswith("#")]


def _numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _numbers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(one) for one in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _text(value: Any, kind: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"check {kind} needs text, got {value!r}")
    return value


def _words(text: str) -> str:
    return " ".join(text.split())


def _short(text: str) -> str:
    return repr(text if len(text) <= 120 else text[:117] + "...")
