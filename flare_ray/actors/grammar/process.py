"""One compiling process as its owner sees it: started on first use, killed over time."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass

from flare_ray.actors.grammar import worker
from flare_ray.contracts.grammar import GrammarSpec
from flare_ray.controller.grammar.gate import PARAM
from flare_ray.errors import InvalidRequest, Overloaded

logger = logging.getLogger("ray.serve.flare")

START_LIMIT_S = 120.0
"""Seconds for a process to import the library, on a host that is starting an engine."""
RETRY_AFTER_S = 5.0
GONE_LIMIT_S = 0.2


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Seconds and bytes that one grammar may take."""

    seconds: float
    memory_bytes: int


class CompileProcess:
    """Compiles one grammar after another. Used by one thread, but for `kill`.

    Args:
        table: bytes by token id.
        eos_ids: terminal tokens.
    """

    def __init__(
        self, table: tuple[bytes, ...], eos_ids: tuple[int, ...], limits: CompileLimits
    ) -> None:
        self._start_order = worker.Start(table, eos_ids, limits.memory_bytes)
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Have a process ready.

        Raises:
            Overloaded: status 503: it did not start.
        """
        if self._process is not None and self._process.poll() is None:
            return
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        # One thread: compiling must not take the cores that rounds run on.
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-m", worker.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        answer = self._ask(self._start_order, START_LIMIT_S)
        if not isinstance(answer, worker.Ready):
            self.kill()
            raise Overloaded(
                "the process that compiles grammars did not start; see the log",
                retry_after_s=RETRY_AFTER_S,
                status=503,
            )

    def compile(self, spec: GrammarSpec) -> str:
        """The compiled grammar as text.

        Raises:
            InvalidRequest: it cannot be compiled, or not within the limits.
            Overloaded: status 503: no process could be started.
        """
        self.start()
        answer = self._ask(worker.Compile(spec), self._limits.seconds)
        if isinstance(answer, worker.Done):
            return answer.text
        if isinstance(answer, worker.Refused):
            raise InvalidRequest(
                answer.message, param=answer.param or PARAM, code="invalid_grammar"
            )
        ended = self._has_gone()
        self.kill()
        if ended:
            raise InvalidRequest(worker.OUT_OF_MEMORY, param=PARAM, code="invalid_grammar")
        raise InvalidRequest(
            f"it does not compile within {self._limits.seconds:g} s; make it smaller",
            param=PARAM,
            code="invalid_grammar",
        )

    def kill(self) -> None:
        """End the process now; any thread, idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()

    def _ask(self, order: worker.Order, limit_s: float) -> worker.Answer | None:
        """The answer; None if there is none in time, or the process has gone."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return None
        try:
            worker.write_frame(process.stdin, worker.encode(order))  # type: ignore[arg-type]
            frame = _read_frame(process.stdout.fileno(), time.monotonic() + limit_s)
        except (OSError, ValueError) as error:
            logger.warning("the process that compiles grammars has gone: %s", error)
            return None
        return None if frame is None else worker.decode_answer(frame)

    def _has_gone(self) -> bool:
        """Whether the process has ended, or is about to: its end of the pipe closes first."""
        process = self._process
        if process is None:
            return True
        try:
            process.wait(GONE_LIMIT_S)
        except subprocess.TimeoutExpired:
            return False
        return True


def _read_frame(fd: int, deadline: float) -> bytes | None:
    """One message before `deadline`; None if it does not come, or the other end has closed."""
    data = bytearray()
    needed = worker.LENGTH.size
    while len(data) < needed or needed == worker.LENGTH.size:
        if len(data) == worker.LENGTH.size == needed:
            needed += worker.LENGTH.unpack(data)[0]
            continue
        ready, _, _ = select.select([fd], [], [], max(deadline - time.monotonic(), 0.0))
        chunk = os.read(fd, needed - len(data)) if ready else b""
        if not chunk:
            return None
        data += chunk
    return bytes(data[worker.LENGTH.size :])
