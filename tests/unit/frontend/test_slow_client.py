"""A client that reads slowly costs memory for its own text only, and nobody else's time
(contract: A4)."""

import asyncio
import socket
import time

import pytest

from flare_ray.contracts.messages import Delta, Finished
from tests.support.fake_engine_client import answer
from tests.support.http_server import chat_codec, http_server, wait_running
from tests.unit.frontend.test_remote_client import REQUEST, run, short_waits

fast = short_waits
"""The remote client's own waits, shortened."""
DELTAS = 5000
OTHERS_LIMIT_S = 10.0
READ_LIMIT_S = 30.0
SMALL_BUFFER = 4096


def test_output_that_waits_for_a_slow_reader_is_joined_and_none_of_it_is_lost():
    def behave(call, _):
        call.admit()
        for token in range(DELTAS):
            call.delta(token)
        call.finish()

    async def scenario(cluster):
        stream = await cluster.client.open(REQUEST)
        await asyncio.sleep(0.05)  # the reader is away while everything arrives
        found = [event async for event in stream]
        await stream.aclose()
        return found

    events, _ = run(behave, scenario)
    assert len(events) == 2
    assert events[0].tokens == tuple(range(DELTAS))
    assert isinstance(events[1], Finished)


def test_deltas_are_handed_out_one_by_one_to_a_reader_that_keeps_up():
    def behave(call, _):
        call.admit()
        call.delta(0)

    async def scenario(cluster):
        stream = await cluster.client.open(REQUEST)
        (call,), found = cluster.calls, []
        async for event in stream:
            found.append(event)
            if len(found) < 3:
                call.delta(len(found))
            elif len(found) == 3:
                call.finish()
        await stream.aclose()
        return found

    events, _ = run(behave, scenario)
    assert [event.tokens for event in events if isinstance(event, Delta)] == [(0,), (1,), (2,)]


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return chat_codec(tmp_path_factory.mktemp("checkpoint"))


def request_of(port, text):
    body = (
        '{"model": "tiny", "stream": true, "max_tokens": 400, '
        f'"messages": [{{"role": "user", "content": "{text}"}}]}}'
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


def connected(port, text):
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    sock.connect(("127.0.0.1", port))
    sock.settimeout(READ_LIMIT_S)
    sock.sendall(request_of(port, text))
    return sock


def read_all(sock):
    data = bytearray()
    while piece := sock.recv(65536):
        data += piece
    sock.close()
    return bytes(data)


def test_a_client_that_reads_nothing_delays_no_other_and_gets_its_whole_answer_later(
    codec, free_port
):
    port = free_port()
    text = "z" * DELTAS
    script = answer(f"</think>{text}", step=1)
    with http_server(codec, port, script, send_buffer=SMALL_BUFFER) as (engine, _):
        slow = connected(port, "slow")
        while not engine.requests:
            time.sleep(0.01)
        started_s = time.monotonic()
        others = [read_all(connected(port, f"n{place}")) for place in range(2)]
        assert time.monotonic() - started_s < OTHERS_LIMIT_S
        assert all(found.count(b'"z"') == DELTAS for found in others)
        wait_running(engine, {engine.requests[0].request_id})  # it is still being written
        found = read_all(slow)
    assert found.count(b'"z"') == DELTAS
    assert b"data: [DONE]" in found
