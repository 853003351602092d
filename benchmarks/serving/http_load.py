"""Clients of the HTTP benchmark on plain sockets: they must cost less than what they measure."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.http_engine import STAMP_LETTERS, age_us

CONTENT = b'"content":"'
END = b"data: [DONE]\n\n"
DISCONNECT_LIMIT_S = 0.05
DISCONNECTS_AT_ONCE = 16


@dataclass(slots=True)
class Latencies:
    """From the engine's sending to the client's reading.

    Attributes:
        from_s: monotonic time before which nothing is counted.
        until_s: likewise after.
        delays_us: of every delta in between.
    """

    from_s: float
    until_s: float
    delays_us: list[int] = field(default_factory=list)


def request_bytes(port: int, deltas: int) -> bytes:
    """One streamed chat request for so many deltas."""
    body = json.dumps(
        {
            "model": "paced",
            "stream": True,
            "max_tokens": deltas * STAMP_LETTERS,
            "messages": [{"role": "user", "content": "Count the stars above the hill."}],
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def read_streams(port: int, streams: int, deltas: int, found: Latencies) -> None:
    """Read so many streams side by side, each to its end.

    Raises:
        BenchmarkFailure: one was refused, failed or was cut.
    """
    await asyncio.gather(*(_read_stream(port, deltas, found) for _ in range(streams)))


async def _read_stream(port: int, deltas: int, found: Latencies) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(port, deltas))
    pending, seen = b"", 0
    while END not in pending:
        data = await reader.read(65536)
        now_s, now_us = time.monotonic(), time.monotonic_ns() // 1000
        if not data:
            raise BenchmarkFailure(f"a stream was cut after {seen} of {deltas} deltas: {pending!r}")
        pending += data
        at = pending.find(CONTENT)
        while at >= 0:
            stamps = pending[at + len(CONTENT) :]
            end = stamps.find(b'"')
            if end < 0:
                break
            # Deltas that lay waiting are handed out together.
            for start in range(0, end, STAMP_LETTERS):
                seen += 1
                if found.from_s <= now_s < found.until_s:
                    stamp = stamps[start : start + STAMP_LETTERS]
                    found.delays_us.append(age_us(stamp, now_us))
            pending = stamps[end:]
            at = pending.find(CONTENT)
    writer.close()
    if seen != deltas:
        raise BenchmarkFailure(f"a stream brought {seen} of {deltas} deltas")


async def disconnect(port: int, count: int, rng: random.Random) -> None:
    """Open so many streams, some at a time, and leave each at a random moment."""
    slots = asyncio.Semaphore(DISCONNECTS_AT_ONCE)

    async def leave(after_s: float) -> None:
        async with slots:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes(port, 10_000))
            await asyncio.sleep(after_s)
            writer.transport.abort()

    await asyncio.gather(*(leave(rng.uniform(0.0, DISCONNECT_LIMIT_S)) for _ in range(count)))


async def get_json(port: int, path: str) -> dict[str, int]:
    """The JSON object at a path."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    found: dict[str, int] = json.loads(answer.split(b"\r\n\r\n", 1)[1])
    return found
