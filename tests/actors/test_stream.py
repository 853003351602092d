"""Channel (b): batches over ZeroMQ from several engines to one receiver."""

import asyncio
import contextlib
import time

import msgspec
import pytest
import zmq
import zmq.asyncio

from flare_ray.actors import stream as stream_module
from flare_ray.actors.stream import StreamSender
from flare_ray.actors.stream_receiver import StreamReceiver
from flare_ray.contracts.messages import (
    Admitted,
    Delta,
    Failed,
    Finished,
    Heartbeat,
    StreamBatch,
)

pytestmark = pytest.mark.anyio

SECRET = b"s" * 32
LIMIT_S = 5.0


class Inbox:
    """What a receiver handed over."""

    def __init__(self) -> None:
        self.items: list = []
        self.lookups: list[str] = []
        self.secrets = {"a": SECRET, "b": b"t" * 32}

    def take(self, items) -> None:
        self.items += items

    async def secret_of(self, engine_id: str) -> bytes | None:
        self.lookups.append(engine_id)
        return self.secrets.get(engine_id)

    async def wait(self, count: int) -> list:
        async with asyncio.timeout(LIMIT_S):
            while len(self.items) < count:
                await asyncio.sleep(0.005)
        return self.items


@contextlib.asynccontextmanager
async def receiving(inbox: Inbox, *, heartbeat_timeout_s: float = 10.0):
    receiver = StreamReceiver(
        inbox.secret_of, inbox.take, host="127.0.0.1", heartbeat_timeout_s=heartbeat_timeout_s
    )
    receiver.start()
    try:
        yield receiver
    finally:
        await receiver.close()


@contextlib.contextmanager
def sending(engine_id: str = "a", secret: bytes = SECRET, **options):
    sender = StreamSender(engine_id, secret, **options)
    try:
        yield sender
    finally:
        sender.close(linger_s=0.0)


def finished(request_id: str) -> Finished:
    return Finished(request_id, "stop", prompt_tokens=3, completion_tokens=2)


async def test_items_of_two_engines_arrive_in_order_at_their_requests():
    inbox = Inbox()
    async with receiving(inbox) as receiver:
        with sending("a") as first, sending("b", b"t" * 32) as second:
            for name in ("x", "y"):
                receiver.expect(name)
            for sender, name in ((first, "x"), (second, "y")):
                sender.send(receiver.address, (Admitted(name),))
                sender.send(receiver.address, (Delta(name, (1, 2)), Heartbeat(4)))
                sender.send(receiver.address, (finished(name),))
            items = await inbox.wait(6)
            for name in ("x", "y"):
                mine = [item for item in items if item.request_id == name]
                assert mine == [Admitted(name), Delta(name, (1, 2)), finished(name)]
            assert sorted(inbox.lookups) == ["a", "b"]
            assert len(receiver) == 0


async def test_items_of_unexpected_and_forgotten_requests_are_dropped():
    inbox = Inbox()
    async with receiving(inbox) as receiver:
        with sending() as sender:
            receiver.expect("gone")
            receiver.forget("gone")
            receiver.expect("last")
            for name in ("never", "gone", "last"):
                sender.send(receiver.address, (Delta(name, (1,)),))
            assert await inbox.wait(1) == [Delta("last", (1,))]


async def test_message_with_a_wrong_secret_is_dropped_and_counted():
    inbox = Inbox()
    async with receiving(inbox) as receiver:
        receiver.expect("x")
        with sending("a", b"wrong") as forger, sending("a") as sender:
            forger.send(receiver.address, (Failed("x", "rank_failure", "forged"),))
            await wait_for(lambda: receiver.refused == 1)
            sender.send(receiver.address, (Admitted("x"),))
            assert await inbox.wait(1) == [Admitted("x")]


async def test_message_of_an_unknown_engine_is_dropped_with_one_lookup():
    inbox = Inbox()
    async with receiving(inbox) as receiver:
        receiver.expect("x")
        with sending("stranger") as sender:
            for _ in range(5):
                sender.send(receiver.address, (Admitted("x"),))
            await wait_for(lambda: receiver.refused == 5)
            assert inbox.lookups == ["stranger"] and inbox.items == []


async def test_unreadable_message_is_dropped_and_the_next_one_arrives():
    inbox = Inbox()
    async with receiving(inbox) as receiver:
        receiver.expect("x")
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket, sending() as sender:
            socket.connect(receiver.address)
            socket.send(b"\xc1")
            await wait_for(lambda: receiver.refused == 1)
            sender.send(receiver.address, (Admitted("x"),))
            await inbox.wait(1)


async def test_batches_behind_a_slow_lookup_arrive_in_order_once_it_ends():
    inbox, may_answer = Inbox(), asyncio.Event()
    look_up = inbox.secret_of

    async def slowly(engine_id):
        await may_answer.wait()
        return await look_up(engine_id)

    inbox.secret_of = slowly
    async with receiving(inbox) as receiver:
        with sending() as sender:
            receiver.expect("x")
            for token in range(20):
                sender.send(receiver.address, (Delta("x", (token,)),))
            await asyncio.sleep(0.05)
            assert inbox.items == []
            may_answer.set()
            items = await inbox.wait(20)
    assert [item.tokens for item in items[:20]] == [(token,) for token in range(20)]
    assert inbox.lookups == ["a"]


async def test_receiver_closes_in_the_middle_of_a_lookup():
    inbox, asked = Inbox(), asyncio.Event()

    async def never(engine_id):
        asked.set()
        await asyncio.sleep(3600)

    inbox.secret_of = never
    async with receiving(inbox) as receiver:
        with sending() as sender:
            receiver.expect("x")
            sender.send(receiver.address, (Delta("x", (1,)),))
            await asyncio.wait_for(asked.wait(), LIMIT_S)
    (failed,) = inbox.items
    assert isinstance(failed, Failed) and failed.request_id == "x"


async def test_failing_lookup_does_not_end_the_receiver():
    inbox = Inbox()

    async def broken(engine_id: str) -> bytes | None:
        if engine_id == "b":
            raise OSError("no directory")
        return SECRET

    inbox.secret_of = broken
    async with receiving(inbox) as receiver:
        receiver.expect("x")
        with sending("b") as unlucky, sending("a") as sender:
            unlucky.send(receiver.address, (Admitted("x"),))
            await asyncio.sleep(0.05)
            sender.send(receiver.address, (Admitted("x"),))
            assert await inbox.wait(1) == [Admitted("x")]


async def test_lost_batch_fails_the_requests_it_may_have_concerned():
    inbox = Inbox()
    async with receiving(inbox) as receiver:
        for name in ("x", "unbound"):
            receiver.expect(name)
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.connect(receiver.address)
            for sequence, item in ((1, Admitted("x")), (3, Admitted("unbound"))):
                batch = StreamBatch(SECRET, "a", sequence, (item,))
                socket.send(msgspec.msgpack.encode(batch))
            items = await inbox.wait(3)
    assert isinstance(items[1], Failed) and items[1].request_id == "x"
    assert "batch 3 came after 1" in items[1].message and items[1].emitted
    assert items[2] == Admitted("unbound")


async def test_silent_engine_fails_its_requests_but_heartbeats_keep_them():
    inbox = Inbox()
    async with receiving(inbox, heartbeat_timeout_s=0.4) as receiver:
        with sending("a") as silent, sending("b", b"t" * 32) as beating:
            for sender, name in ((silent, "x"), (beating, "y")):
                receiver.expect(name)
                sender.send(receiver.address, (Admitted(name),))
            await inbox.wait(2)
            start = time.monotonic()
            while len(inbox.items) < 3 and time.monotonic() - start < LIMIT_S:
                beating.send(receiver.address, (Heartbeat(1),))
                await asyncio.sleep(0.05)
            assert len(receiver) == 1
    failed = inbox.items[2]
    assert isinstance(failed, Failed) and failed.request_id == "x"
    assert "no heartbeat from engine a" in failed.message


async def test_request_that_no_engine_acknowledges_fails():
    inbox = Inbox()
    async with receiving(inbox, heartbeat_timeout_s=0.2) as receiver:
        receiver.expect("x")
        (failed,) = await inbox.wait(1)
        assert isinstance(failed, Failed) and not failed.emitted
        assert len(receiver) == 0


async def test_closing_receiver_fails_what_is_still_expected():
    inbox = Inbox()
    async with receiving(inbox) as receiver:
        receiver.expect("x")
    assert isinstance(inbox.items[0], Failed) and "shutting down" in inbox.items[0].message


async def test_request_expected_twice_is_refused():
    async with receiving(Inbox()) as receiver:
        receiver.expect("x")
        with pytest.raises(ValueError, match="x"):
            receiver.expect("x")


def test_consumer_too_far_behind_is_lost_without_blocking_the_sender(free_port):
    lost: list[str] = []
    address = f"tcp://127.0.0.1:{free_port()}"
    with sending(high_water_batches=8) as sender:
        sender.on_lost = lost.append
        start = time.monotonic()
        for _ in range(9):
            sender.send(address, (Delta("x", (1,)),))
        assert lost == [address]
        assert time.monotonic() - start < 1.0


async def test_lost_consumer_does_not_disturb_another(free_port):
    inbox = Inbox()
    dead = f"tcp://127.0.0.1:{free_port()}"
    async with receiving(inbox) as receiver:
        with sending(high_water_batches=4) as sender:
            receiver.expect("x")
            for count in range(20):
                sender.send(dead, (Delta("dead", (1,)),))
                sender.send(receiver.address, (Delta("x", (count,)),))
                await asyncio.sleep(0.005)
            items = list(await inbox.wait(20))
    assert [item.tokens for item in items] == [(count,) for count in range(20)]


def test_unusable_address_is_lost_at_once():
    lost: list[str] = []
    with sending() as sender:
        sender.on_lost = lost.append
        sender.send("nonsense", (Delta("x", (1,)),))
    assert lost == ["nonsense"]


async def test_consumer_that_died_is_lost_at_a_later_heartbeat(monkeypatch):
    monkeypatch.setattr(stream_module, "UNREACHABLE_S", 0.2)
    monkeypatch.setattr(stream_module, "CHECK_S", 0.0)
    lost: list[str] = []
    inbox = Inbox()
    with sending() as sender:
        sender.on_lost = lost.append
        async with receiving(inbox) as receiver:
            receiver.expect("x")
            sender.send(receiver.address, (Admitted("x"), Heartbeat(1)))
            await inbox.wait(1)
            await asyncio.sleep(0.3)
            sender.send(receiver.address, (Heartbeat(2),))
            assert lost == []
        start = time.monotonic()
        while not lost and time.monotonic() - start < LIMIT_S:
            sender.send(receiver.address, (Heartbeat(3),))
            await asyncio.sleep(0.05)
    assert lost == [receiver.address]


async def test_idle_socket_is_closed_and_its_next_batch_is_no_gap(monkeypatch):
    monkeypatch.setattr(stream_module, "IDLE_S", 0.0)
    inbox = Inbox()
    async with receiving(inbox) as receiver, receiving(Inbox()) as other:
        with sending() as sender:
            for place, name in enumerate(("x", "y"), start=1):
                receiver.expect(name)
                sender.send(receiver.address, (Admitted(name),))
                sender.send(receiver.address, (finished(name),))
                await inbox.wait(2 * place)
                sender.send(other.address, (Heartbeat(1),))
            items = await inbox.wait(4)
    assert not any(isinstance(item, Failed) for item in items)


async def wait_for(condition) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)
