"""The exception tree. Every message says what was wrong, what was got or expected, and what to
change.

Errors are values until the actor boundary (design/architecture.md section 5); `ContractViolation`
and `RankFailure` stop the engine, everything else ends one request or one start-up.
"""

from __future__ import annotations

import functools
from typing import Any


class FlareError(Exception):
    """Root of everything this project raises on purpose."""


class ConfigError(FlareError):
    """A configuration value or key is wrong; the message carries its path."""


class CheckpointError(FlareError):
    """A checkpoint does not match its recipe's manifest.

    Args:
        problems: one line per missing, extra, misshapen, mistyped or truncated tensor.
    """

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__("\n".join((message, *problems)))
        self.problems = problems


class CapacityError(FlareError):
    """Something does not fit: names what is needed, what is available and which knob changes it."""


class InvalidRequest(FlareError):
    """A client's request is wrong (HTTP 4xx).

    Args:
        param: request field to blame, as the client wrote it; None when no single field is at
            fault.
        code: machine-readable OpenAI error code.
        status: HTTP status, 400 unless another 4xx is more precise.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_request_error",
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class Overloaded(FlareError):
    """No capacity now (HTTP 429 or 503): the client may retry after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float, status: int = 429) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        """Keyword-only arguments survive the way through another process."""
        make = functools.partial(type(self), retry_after_s=self.retry_after_s, status=self.status)
        return make, self.args, self.__dict__


class RateLimited(Overloaded):
    """A client has asked for more than it may (HTTP 429); others are served."""


class RankFailure(FlareError):
    """A rank died, hung or disagreed. Sticky: the engine that saw it never runs another round.

    Args:
        rank: rank at fault; -1 when ranks disagree and none can be blamed.
        round_id: last round submitted to it; -1 before the first.
    """

    def __init__(self, message: str, *, rank: int, round_id: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.round_id = round_id

    def __reduce__(self) -> tuple[Any, ...]:
        """Keyword-only arguments survive the way through another process."""
        make = functools.partial(type(self), rank=self.rank, round_id=self.round_id)
        return make, self.args, self.__dict__


class ContractViolation(FlareError):
    """Our own bug: an invariant stated by the contract does not hold. Stops the engine."""
