"""Where the ranks of one engine meet its controller: private folder, greeting, last words.

Owns the life of the sockets until `channel.SocketChannel` has them; nothing here runs per round.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
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
from flare_ray.errors import ConfigError, RankFailure

MAX_SOCKET_PATH_BYTES = 107
"""sockaddr_un holds 108 bytes with the terminating zero."""

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
    """Where the ranks of one engine connect; gone from the file system once all have.

    The folder is private (mode 0700) and each peer must run as the same user.

    Raises:
        ConfigError: the temporary folder's path is too long for a socket address.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.mkdtemp(prefix="flare-")
        self.path = os.path.join(self._folder, "ranks")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            if len(os.fsencode(self.path)) > MAX_SOCKET_PATH_BYTES:
                raise ConfigError(
                    f"the socket path {self.path} is longer than {MAX_SOCKET_PATH_BYTES} bytes; "
                    "set TMPDIR to a shorter folder"
                )
            self._sock.bind(self.path)
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
        """Stop listening and remove the folder; idempotent."""
        self._sock.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _missing(self, links: dict[int, RankLink]) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in links]

    def _greet(self, deadline: float, *, missing: list[int]) -> RankLink:
        sock = None
        try:
            self._sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock, _ = self._sock.accept()
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
        _, uid, _ = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        problem = ""
        if uid != os.getuid():
            problem = f"user {uid} connected, expected {os.getuid()}"
        elif hello.world_size != self.world_size or not 0 <= hello.rank < self.world_size:
            problem = (
                f"rank {hello.rank} of {hello.world_size} connected to an engine of "
                f"{self.world_size} ranks"
            )
        if problem:
            link.close()
            raise RankFailure(problem, rank=hello.rank, round_id=-1)
        return link


def connect(path: str, hello: RankHello, *, words_fd: int, timeout_s: float) -> socket.socket:
    """A rank's blocking socket to its engine, greeted; the engine keeps a copy of `words_fd`.

    Raises:
        OSError: nobody listens at `path`.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        socket.send_fds(sock, [encode_hello(hello)], [words_fd])
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock
