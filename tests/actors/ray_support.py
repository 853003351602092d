"""What the tests on Ray share: a receiver on a thread, live processes, waiting."""

import asyncio
import os
import threading
import time
from pathlib import Path

from flare_ray.actors.directory import EngineDirectory
from flare_ray.actors.listener import ADDRESS_PREFIX
from flare_ray.actors.stream_receiver import StreamReceiver
from flare_ray.contracts.messages import Delta, Failed, Finished


class Listener:
    """A `StreamReceiver` on an event loop of its own thread, as an ingress replica has one."""

    def __init__(self, application: str) -> None:
        self._directory = EngineDirectory(application)
        self.items: list = []
        self._arrived = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._receiver = self._run(self._make())
        self.address = self._receiver.address

    async def _make(self) -> StreamReceiver:
        async def secret_of(engine_id: str) -> bytes | None:
            record = await asyncio.to_thread(self._directory.engine, engine_id)
            return record and record.secret

        receiver = StreamReceiver(secret_of, self._take, host="127.0.0.1", heartbeat_timeout_s=10.0)
        receiver.start()
        return receiver

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    def _take(self, items) -> None:
        with self._arrived:
            self.items += items
            self._arrived.notify_all()

    def expect(self, request_id: str) -> None:
        self._loop.call_soon_threadsafe(self._receiver.expect, request_id)

    def of(self, request_id: str) -> list:
        return [item for item in self.items if item.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        deltas = [item for item in self.of(request_id) if isinstance(item, Delta)]
        return [token for delta in deltas for token in delta.tokens]

    def end(self, request_id: str, *, timeout_s: float = 20.0):
        """The last item of a request, once it is here."""
        with self._arrived:
            found = self._arrived.wait_for(
                lambda: any(isinstance(i, Finished | Failed) for i in self.of(request_id)),
                timeout_s,
            )
        assert found, f"{request_id} did not end: {self.of(request_id)}"
        return self.of(request_id)[-1]

    def wait_for_output(self, request_id: str, *, timeout_s: float = 20.0) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: self.tokens(request_id), timeout_s)

    def close(self) -> None:
        self._run(self._receiver.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


def is_alive(pid: int) -> bool:
    """The process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, *, timeout_s: float, what: str) -> float:
    """Seconds until `condition()` is true."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - start


def shared_memory_files() -> set[str]:
    """Names in the shared-memory folder that are not Ray's own."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("plasma")}


def rank_addresses() -> set[str]:
    """Addresses of this machine at which ranks and engines meet, as the kernel lists them."""
    lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    names = {line.split()[-1] for line in lines}
    return {name for name in names if name.startswith(ADDRESS_PREFIX)}
