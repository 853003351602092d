"""Where the ranks of one engine meet its controller: address, greeting, last words.

Owns the life of the sockets until `channel.SocketChannel` has them; nothing here runs per round.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass

import msgspec

from flare_ray.actors.wire import (
    ERROR_TEXT_BYTES,
    MAX_MESSAGE_BYTES,
    SEND_BUFFER_BYTES,
    RankHello,
    decode_hello,
    encode_hello,
)
from flare_ray.errors import RankFailure

logger = logging.getLogger("ray.serve.flare")

ADDRESS_PREFIX = "@flare-"
ADDRESS_BYTES = 16

_CREDENTIALS = struct.Struct("3i")


@dataclass(slots=True)
class RankLink:
    """One accepted rank.

    Attributes:
        words_fd: memory file into which the rank writes before it dies (`rank_loop.LastWords`);
            -1 when the rank offers none.
    """

    rank: int
    pid: int
    sock: socket.socket
    words_fd: int = -1

    def last_words(self) -> str:
        """What the rank wrote before it ended, "" if nothing; readable after its death."""
        if self.words_fd < 0:
            return ""
        size = os.fstat(self.words_fd).st_size
        start = max(size - ERROR_TEXT_BYTES, 0)
        return os.pread(self.words_fd, size - start, start).decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Close the socket, which tells the rank to exit, and the memory file."""
        self.sock.close()
        if self.words_fd >= 0:
            os.close(self.words_fd)
            self.words_fd = -1


class RankListener:
    """Where the ranks of one engine connect; closed once all have.

    The address is a name in Linux's abstract space, not a file: an engine that is killed while it
    starts leaves nothing. Such a name has no mode, so each peer must run as the same user.

    Attributes:
        address: "@" and a name nobody can guess, as the kernel's own tables show it.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.address = ADDRESS_PREFIX + secrets.token_hex(ADDRESS_BYTES)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._sock.bind(_abstract(self.address))
            self._sock.listen(world_size)
        except BaseException:
            self.close()
            raise

    def accept(self, *, timeout_s: float) -> list[RankLink]:
        """Greet every rank and hand over their sockets; the listener is closed afterwards.

        Args:
            timeout_s: for all greetings together.

        Returns:
            One link per rank, in rank order; the caller closes them.

        Raises:
            RankFailure: a rank did not greet in time, twice, or with another world size.
        """
        links: dict[int, RankLink] = {}
        deadline = time.monotonic() + timeout_s
        try:
            while len(links) < self.world_size:
                link = self._greet(deadline, missing=self._missing(links))
                if link.rank in links:
                    link.close()
                    raise RankFailure(
                        f"rank {link.rank} connected twice", rank=link.rank, round_id=-1
                    )
                links[link.rank] = link
        except BaseException:
            for link in links.values():
                link.close()
            raise
        finally:
            self.close()
        return [links[rank] for rank in sorted(links)]

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._sock.close()

    def _missing(self, links: dict[int, RankLink]) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in links]

    def _greet(self, deadline: float, *, missing: list[int]) -> RankLink:
        sock = None
        try:
            sock = self._accept_own(deadline)
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            message, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, 1)
            hello = decode_hello(message)
        except (TimeoutError, OSError, msgspec.MsgspecError) as error:
            if sock is not None:
                sock.close()
            raise RankFailure(
                f"ranks {missing} did not greet in time ({error or 'timeout'}); see their logs",
                rank=missing[0],
                round_id=-1,
            ) from error
        sock.setblocking(False)
        link = RankLink(hello.rank, hello.pid, sock, fds[0] if fds else -1)
        if hello.world_size != self.world_size or not 0 <= hello.rank < self.world_size:
            link.close()
            raise RankFailure(
                f"rank {hello.rank} of {hello.world_size} connected to an engine of "
                f"{self.world_size} ranks",
                rank=hello.rank,
                round_id=-1,
            )
        return link

    def _accept_own(self, deadline: float) -> socket.socket:
        """The next connection of this user; others are turned away and cannot end the start."""
        while True:
            self._sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock, _ = self._sock.accept()
            user = user_of(sock)
            if user == os.getuid():
                return sock
            logger.warning("user %d connected as a rank of user %d: refused", user, os.getuid())
            sock.close()


def user_of(sock: socket.socket) -> int:
    """Whose process is at the other end, as the kernel says."""
    size = _CREDENTIALS.size
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)


def _abstract(address: str) -> str:
    return "\0" + address.removeprefix("@")


def connect(address: str, hello: RankHello, *, words_fd: int, timeout_s: float) -> socket.socket:
    """A rank's blocking socket to its engine, greeted; the engine keeps a copy of `words_fd`.

    Raises:
        OSError: nobody listens at `address`.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout_s)
        sock.connect(_abstract(address))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        socket.send_fds(sock, [encode_hello(hello)], [words_fd])
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock
