"""Runs a function in a fresh process, so that arms share neither threads nor memory."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.service import DROPPED_VARIABLES

EXIT_LIMIT_S = 10.0
"""Seconds a process gets to leave once it has answered."""

Argument = TypeVar("Argument")
Result = TypeVar("Result")


def call_alone(
    function: Callable[[Argument], Result], argument: Argument, *, limit_s: float
) -> Result:
    """`function(argument)` in a process of its own; both ends must be picklable.

    Raises:
        BenchmarkFailure: it took longer than `limit_s` (it is killed), or died; its own traceback
            is on standard error.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(function, argument, sender))
    dropped = {n: os.environ.pop(n) for n in DROPPED_VARIABLES if n in os.environ}
    try:
        process.start()
    finally:
        os.environ.update(dropped)
    sender.close()
    try:
        if not receiver.poll(limit_s):
            raise BenchmarkFailure(f"{function.__name__} did not end within {limit_s:.0f} s")
        try:
            result: Result = receiver.recv()
        except EOFError:
            raise BenchmarkFailure(f"{function.__name__} failed in its process") from None
        process.join(EXIT_LIMIT_S)
    finally:
        process.kill()
        process.join()
    return result


def _run(function: Callable[[Argument], Result], argument: Argument, sender: Connection) -> None:
    sender.send(function(argument))
    sender.close()
