"""Streams between real processes: all items in order, credits, and ends from either side."""

from __future__ import annotations

import asyncio
import select
import time

import pytest
import zmq
from rpc_fixtures import *  # noqa: F403 - the fixtures
from rpc_process import (
    AT_ONCE_S,
    ActorProcess,
    connected,
    count,
    on_uvloop,
    read_all,
    run,
    until_count,
)

from umbra.runtime.errors import DeadlineExceeded, ProtocolError, RemoteError
from umbra.runtime.rpc.loop_socket import LoopSocket
from umbra.runtime.rpc.wire import Frame

pytestmark = pytest.mark.process


@on_uvloop
async def test_a_stream_gives_every_item_in_order(shared: ActorProcess) -> None:
    async with connected(shared.ref) as probe:
        for credits in (1, 2, 16, 5000):
            async with probe.stream("numbers", 1000, timeout_s=60.0, credits=credits) as items:
                assert [item async for item in items] == list(range(1000))


@pytest.mark.slow
@on_uvloop
async def test_a_slow_reader_slows_the_writer(actor: ActorProcess) -> None:
    credits = 8

    async with (
        connected(actor.ref) as probe,
        probe.stream("numbers", 10**9, timeout_s=60.0, credits=credits) as items,
    ):
        num_taken = 0
        for num_more in (1, 20):
            for _ in range(num_more):
                await anext(items)
                num_taken += 1
            # Time enough for thousands of items, were they not held back.
            await asyncio.sleep(0.2)
            assert 0 <= await count(probe, "yielded") - num_taken <= credits


@on_uvloop
async def test_closing_a_stream_cancels_the_generator(actor: ActorProcess) -> None:
    async with connected(actor.ref) as probe:
        async with probe.stream("silence", timeout_s=60.0) as items:
            assert await anext(items) == 0
        async with probe.stream("numbers", 10**9, timeout_s=60.0, credits=4) as items:
            async for item in items:
                if item == 10:
                    break
        await until_count(probe, "stream closed", 2, AT_ONCE_S)


def test_a_stream_that_fails_gives_its_items_first(shared: ActorProcess) -> None:
    received: list[int] = []

    async def main() -> None:
        async with (
            connected(shared.ref) as probe,
            probe.stream("numbers", 10, fail_at=5, timeout_s=60.0) as items,
        ):
            async for item in items:
                received.append(item)

    with pytest.raises(RemoteError, match="no number 5"):
        run(main())
    assert received == [0, 1, 2, 3, 4]


@on_uvloop
async def test_a_silent_stream_ends_at_its_deadline_and_its_generator_too(
    actor: ActorProcess,
) -> None:
    async with connected(actor.ref) as probe:
        with pytest.raises(DeadlineExceeded, match=r"no item for 0\.3 s"):
            await read_all(probe, "silence", timeout_s=0.3)
        await until_count(probe, "stream closed", 1, AT_ONCE_S)


def test_a_generator_whose_clean_up_fails_does_not_kill_the_actor(actor: ActorProcess) -> None:
    async def main() -> None:
        async with connected(actor.ref) as probe:
            async with probe.stream("clean_up_badly", timeout_s=60.0, credits=2) as items:
                assert await anext(items) == 0
            await asyncio.sleep(0.2)
            assert await probe.call("echo", "alive", timeout_s=30.0) == "alive"

    run(main())
    assert "the clean-up failed" in actor.log()


@on_uvloop
async def test_a_stream_called_as_a_method_and_the_reverse_fail_at_once(
    shared: ActorProcess,
) -> None:
    async with connected(shared.ref) as probe:
        before = time.monotonic()
        with pytest.raises(RemoteError, match="stream"):
            await probe.call("numbers", 3, timeout_s=60.0)
        with pytest.raises(ProtocolError, match="not a generator"):
            await read_all(probe, "echo", 1)
        with pytest.raises(ValueError, match="credits"):
            await read_all(probe, "numbers", 3, credits=0)
        assert time.monotonic() - before < AT_ONCE_S


def test_a_message_that_arrives_before_a_failed_send_is_delivered() -> None:
    async def main(context: zmq.Context[zmq.Socket[bytes]]) -> list[bytes]:
        received: list[bytes] = []
        arrived = asyncio.Event()

        def on_message(frames: list[Frame]) -> None:
            received.append(bytes(frames[1]))
            arrived.set()

        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        router.router_mandatory = True
        endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        socket = LoopSocket(router, on_message, sender="a test")
        dealer.connect(endpoint)
        dealer.send(b"first")
        await arrived.wait()
        arrived.clear()

        dealer.send(b"second")
        assert select.select([router.fileno()], [], [], 10.0)[0]
        with pytest.raises(zmq.ZMQError):
            socket.send([b"no such peer", b""])
        async with asyncio.timeout(30.0):
            await arrived.wait()

        socket.close()
        dealer.close(linger=0)
        return received

    with zmq.Context[zmq.Socket[bytes]]() as context:
        assert run(main(context)) == [b"first", b"second"]
