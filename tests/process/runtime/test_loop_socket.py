"""The socket of an event loop hears of input by edges, which no other operation may swallow."""

from __future__ import annotations

import asyncio
import select

import pytest
import zmq
from rpc_process import run

from umbra.runtime.rpc.loop_socket import LoopSocket
from umbra.runtime.rpc.wire import Frame

pytestmark = pytest.mark.process


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
