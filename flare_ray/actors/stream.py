"""Channel (b), engine's side: one ZeroMQ PUSH socket per ingress replica (contract: A4).

All deltas of a round for one ingress travel in one `StreamBatch`. Sending never blocks the
controller: a consumer that cannot take its batches loses its own requests, nobody else's. The
receiving side is `stream_receiver.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from flare_ray.contracts.messages import StreamBatch, StreamItem

logger = logging.getLogger(__name__)

HIGH_WATER_BATCHES = 1024
"""Batches queued for one ingress before it counts as lost: about ten seconds of rounds at 100 a
second, as long as an ingress itself waits for a heartbeat."""
UNREACHABLE_S = 5.0
"""Seconds without a connection after which an ingress counts as lost. Its death is not always seen
as a cancelled call: a killed process sends none."""
CHECK_S = 0.5
"""Seconds between two looks at a connection's state, which cost a few system calls."""
IDLE_S = 60.0
"""Seconds after its last batch at which an ingress's socket is closed; it had no open request."""
KEEP_ALIVE_MS = 2000
"""ZeroMQ's own probe of a connection, so that a vanished host counts as disconnected."""

_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Peer:
    """One ingress address.

    Attributes:
        sequence: number of the last batch; a new socket starts again, which the receiver notices.
        since_s: when the connection was last gained or lost.
        check_s: when to ask the monitor again.
    """

    socket: zmq.Socket
    monitor: zmq.Socket
    connected: bool
    since_s: float
    sequence: int = 0
    used_s: float = 0.0
    check_s: float = 0.0


class StreamSender:
    """`OutputPort` over ZeroMQ, used by one thread at a time: the controller's, then who closes.

    Args:
        engine_id: identity of this engine replica.
        secret: start-up secret that every batch carries.
        high_water_batches: batches that may wait for one ingress.

    Attributes:
        on_lost: called by `send` with the address of an ingress that cannot be reached or is too
            far behind, after its socket has been dropped; the engine cancels its requests.
    """

    on_lost: Callable[[str], None]

    def __init__(
        self,
        engine_id: str,
        secret: bytes,
        *,
        high_water_batches: int = HIGH_WATER_BATCHES,
    ) -> None:
        self._engine_id = engine_id
        self._secret = secret
        self.on_lost = lambda reply_to: None
        self._high_water_batches = high_water_batches
        self._context = zmq.Context()
        self._peers: dict[str, _Peer] = {}

    def send(self, reply_to: str, items: tuple[StreamItem, ...]) -> None:
        """Queue one batch for the ingress at `reply_to`; never blocks.

        An address that cannot be used at all is lost like one that cannot be reached.
        """
        try:
            peer = self._peers.get(reply_to) or self._connect(reply_to)
            peer.used_s = time.monotonic()
            peer.sequence += 1
            batch = StreamBatch(self._secret, self._engine_id, peer.sequence, items)
            peer.socket.send(_encode(batch), zmq.NOBLOCK)
        except zmq.Again:
            self._lose(reply_to, f"{self._high_water_batches} batches behind")
            return
        except zmq.ZMQError as error:
            self._lose(reply_to, f"unusable ({error})")
            return
        if peer.used_s >= peer.check_s and not self._is_reachable(peer):
            self._lose(reply_to, f"not connected for {UNREACHABLE_S} s")

    def close(self, *, linger_s: float = 0.5) -> None:
        """Close all sockets, giving queued batches `linger_s` to leave; idempotent."""
        for address in list(self._peers):
            self._drop(address, linger_ms=int(linger_s * 1000))
        self._context.term()  # waits for the lingering ones

    def _connect(self, reply_to: str) -> _Peer:
        now = time.monotonic()
        for address in [a for a, p in self._peers.items() if now - p.used_s > IDLE_S]:
            self._drop(address, linger_ms=0)
        sock = self._context.socket(zmq.PUSH)
        sock.set_hwm(self._high_water_batches)
        sock.setsockopt(zmq.HEARTBEAT_IVL, KEEP_ALIVE_MS)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * KEEP_ALIVE_MS)
        monitor = sock.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self._peers[reply_to] = peer = _Peer(sock, monitor, connected=False, since_s=now)
        sock.connect(reply_to)
        return peer

    def _is_reachable(self, peer: _Peer) -> bool:
        now = time.monotonic()
        peer.check_s = now + CHECK_S
        while peer.monitor.poll(0):
            event = parse_monitor_message(peer.monitor.recv_multipart())["event"]
            peer.connected = event == zmq.EVENT_CONNECTED
            peer.since_s = now
        return peer.connected or now - peer.since_s < UNREACHABLE_S

    def _lose(self, reply_to: str, why: str) -> None:
        logger.warning("ingress %s is lost: %s; its requests are cancelled", reply_to, why)
        self._drop(reply_to, linger_ms=0)
        self.on_lost(reply_to)

    def _drop(self, reply_to: str, *, linger_ms: int) -> None:
        peer = self._peers.pop(reply_to)
        peer.socket.disable_monitor()
        peer.monitor.close(linger=0)
        peer.socket.close(linger=linger_ms)
