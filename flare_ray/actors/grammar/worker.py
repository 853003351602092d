"""The compiling process: `python -m flare_ray.actors.grammar.worker`.

Reads length-prefixed msgpack from standard input and answers on standard output, one answer per
order. It is limited in memory and killed over time, so that no grammar can take the engine along.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from flare_ray.contracts.grammar import GrammarSpec
from flare_ray.errors import InvalidRequest

LENGTH = struct.Struct("<I")
PR_SET_PDEATHSIG = 1
OUT_OF_MEMORY = "it is too large to compile"


class Start(msgspec.Struct, frozen=True, tag=True):
    """First order: the vocabulary, and bytes of memory that compiling may take."""

    table: tuple[bytes, ...]
    eos_ids: tuple[int, ...]
    memory_bytes: int


class Compile(msgspec.Struct, frozen=True, tag=True):
    """An order."""

    spec: GrammarSpec


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Start`."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """A compiled grammar as text."""

    text: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """What is wrong with the grammar, and which request field is to blame, if it is known."""

    message: str
    param: str | None = None


Order = Start | Compile
Answer = Ready | Done | Refused
encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def write_frame(stream: BinaryIO, message: bytes) -> None:
    """One message behind its length."""
    stream.write(LENGTH.pack(len(message)) + message)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """One message; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = stream.read(size)
    return body if len(body) == size else None


def main() -> None:
    """Serve orders until standard input ends."""
    # The engine's process may be killed; nobody would read an answer then.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    orders, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    from flare_ray.actors.grammar.xgrammar import Vocabulary

    vocabulary: Vocabulary | None = None
    while (frame := read_frame(orders)) is not None:
        order = decode_order(frame)
        if isinstance(order, Start):
            vocabulary = Vocabulary(order.table, order.eos_ids)
            _limit_memory(order.memory_bytes)
            answer: Answer = Ready()
        else:
            assert vocabulary is not None
            answer = _compile(order.spec, vocabulary)
        write_frame(answers, encode(answer))


def _compile(spec: GrammarSpec, vocabulary: object) -> Answer:
    from flare_ray.actors.grammar.structure import structural_tag
    from flare_ray.actors.grammar.xgrammar import Vocabulary, compile_tag

    assert isinstance(vocabulary, Vocabulary)
    try:
        return Done(compile_tag(structural_tag(spec), vocabulary))
    except InvalidRequest as error:
        return Refused(str(error), error.param)
    except (MemoryError, RecursionError):
        return Refused(OUT_OF_MEMORY)


def _limit_memory(extra_bytes: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
