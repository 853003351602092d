"""A paced engine for the HTTP benchmark, a process of its own: ``python -m ...http_engine``.

It answers every request with five tokens a delta at a fixed rate and runs no model. Deltas leave
through the engine's own `StreamSender`; requests and cancellations come over a ZeroMQ socket in
place of a Serve handle. The tokens spell the time at which they were sent, so that a client can
tell how long they were on their way.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from flare_ray.actors.stream import StreamSender
from flare_ray.config import EngineConfig
from flare_ray.contracts.messages import Admitted, Delta, Finished, Heartbeat, StreamItem
from flare_ray.contracts.request import GenerationRequest
from flare_ray.frontend.settings import chat_format
from flare_ray.frontend.tokenizer import TextCodec
from flare_ray.recipes.declaration import ChatFormat

LETTERS = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
STAMP_LETTERS = 5
STAMP_RANGE_US = 64**STAMP_LETTERS
"""Stamps repeat after eighteen minutes, far longer than anything is on its way."""
PHASES = 8
"""Rounds in the course of one pacing interval: the streams are spread over them, as over the
rounds of several cohorts, instead of arriving in one burst."""
HEARTBEAT_S = 2.0
ENGINE_ID = "paced"
SECRET = b"paced"

SUBMIT, CANCEL, STATS = b"submit", b"cancel", b"stats"


def stamp_of(microseconds: int) -> bytes:
    """Five letters that tell a time."""
    value, letters = microseconds % STAMP_RANGE_US, bytearray()
    for _ in range(STAMP_LETTERS):
        value, digit = divmod(value, 64)
        letters.append(LETTERS[digit])
    return bytes(letters)


def age_us(stamp: bytes, now_us: int) -> int:
    """How long ago a stamp was made."""
    value = 0
    for letter in reversed(stamp):
        value = value * 64 + LETTERS.index(letter)
    return (now_us - value) % STAMP_RANGE_US


@dataclass(slots=True)
class _Live:
    """One request.

    Attributes:
        peer: socket identity of the ingress.
        left: deltas to come.
    """

    request: GenerationRequest
    peer: bytes
    phase: int
    left: int
    begun: bool = False


class PacedEngine:
    """The engine.

    Args:
        letters: token id of each of LETTERS.
        opening: tokens that end the prompt's reasoning.
    """

    def __init__(self, letters: Sequence[int], opening: Sequence[int], *, rate: float) -> None:
        self._letters = dict(zip(LETTERS, letters, strict=True))
        self._opening = tuple(opening)
        self._tick_s = 1.0 / rate / PHASES
        self._sender = StreamSender(ENGINE_ID, SECRET)
        self._sender.on_lost = self._lost
        self._live: dict[str, _Live] = {}
        self._phases: list[dict[str, _Live]] = [{} for _ in range(PHASES)]
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)

    def run(self, address: str) -> None:
        """Serve until the process is terminated."""
        self._socket.bind(address)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        due_s, tick, beat_s = time.monotonic(), 0, 0.0
        while True:
            while poller.poll(_until_ms(due_s)):
                self._take(self._socket.recv_multipart())
            self._emit(self._phases[tick % PHASES])
            tick, due_s = tick + 1, due_s + self._tick_s
            if due_s > beat_s:
                beat_s = due_s + HEARTBEAT_S
                for receiver in {live.request.reply_to for live in self._live.values()}:
                    self._sender.send(receiver, (Heartbeat(tick),))

    def _take(self, parts: list[bytes]) -> None:
        peer, kind, body = parts
        if kind == SUBMIT:
            request = msgspec.msgpack.decode(body, type=GenerationRequest)
            phase = min(range(PHASES), key=lambda p: len(self._phases[p]))
            live = _Live(request, peer, phase, max(1, request.max_tokens // STAMP_LETTERS))
            self._live[request.request_id] = self._phases[phase][request.request_id] = live
            self._sender.send(request.reply_to, (Admitted(request.request_id),))
        elif kind == CANCEL:
            self._forget(body.decode())
        else:
            self._socket.send_multipart([peer, STATS, str(len(self._live)).encode()])

    def _emit(self, due: dict[str, _Live]) -> None:
        batches: dict[str, list[StreamItem]] = {}
        stamp = stamp_of(time.monotonic_ns() // 1000)
        tokens = tuple(self._letters[letter] for letter in stamp)
        for name, live in list(due.items()):
            items = batches.setdefault(live.request.reply_to, [])
            items.append(Delta(name, tokens if live.begun else self._opening + tokens))
            live.begun, live.left = True, live.left - 1
            if not live.left:
                items.append(self._finished(live))
        for address, items in batches.items():
            self._sender.send(address, tuple(items))

    def _finished(self, live: _Live) -> Finished:
        request = live.request
        self._forget(request.request_id)
        end = Finished(request.request_id, "length", len(request.prompt_tokens), request.max_tokens)
        self._socket.send_multipart([live.peer, SUBMIT, msgspec.msgpack.encode(end)])
        return end

    def _forget(self, name: str) -> None:
        live = self._live.pop(name, None)
        if live is not None:
            del self._phases[live.phase][name]

    def _lost(self, address: str) -> None:
        for name in [n for n, live in self._live.items() if live.request.reply_to == address]:
            self._forget(name)


def _until_ms(due_s: float) -> int:
    return max(0, int((due_s - time.monotonic()) * 1000))


def open_codec(checkpoint: Path) -> tuple[TextCodec, ChatFormat]:
    """Tokeniser and chat format of a checkpoint's folder; no weights are read."""
    chat = chat_format(EngineConfig(checkpoint=str(checkpoint)))
    return TextCodec(checkpoint, chat), chat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--address", required=True, help="ZeroMQ address for requests")
    parser.add_argument("--rate", type=float, required=True, help="deltas a second and stream")
    options = parser.parse_args()
    codec, chat = open_codec(options.checkpoint)
    letters = [codec.token_bytes.index(bytes([letter])) for letter in LETTERS]
    opening = codec.encode_prompt(chat.reasoning_close) if chat.prompt_opens_reasoning else []
    PacedEngine(letters, opening, rate=options.rate).run(options.address)


if __name__ == "__main__":
    main()
