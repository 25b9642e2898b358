"""An actor's heartbeat reports the state of its loop."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from rpc_fixtures import *  # noqa: F403 - the fixtures
from rpc_process import ActorProcess, connected, on_uvloop, run

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.heartbeat import Beat, Watchdog
from umbra.runtime.errors import ProtocolError

pytestmark = pytest.mark.process


@given(st.binary(max_size=40) | st.lists(st.integers() | st.text() | st.floats()).map(repr))
def test_what_is_no_heartbeat_is_a_protocol_error(data: Any) -> None:
    with pytest.raises(ProtocolError):
        Beat.decode(data if isinstance(data, bytes) else msgpack.packb(data))


def test_a_heartbeat_arrives_as_it_was_sent() -> None:
    assert Beat.decode(Beat(3, 0.5, 0.0).encode()) == Beat(3, 0.5, 0.0)


def test_an_actor_whose_heartbeats_are_malformed_counts_as_silent(folder: Path) -> None:
    async def main() -> str:
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER)
        endpoint = f"ipc://{folder / 'beats'}"
        router.bind(endpoint)

        async def answer() -> None:
            while True:
                identity, _ = await router.recv_multipart()
                await router.send(identity, zmq.SNDMORE)
                await router.send(b"\xc1")

        spec = ActorSpec(name="probe", target="rpc_probe:Probe", hung_limit_s=0.4)
        watchdog = Watchdog(zmq.Context(context), endpoint, os.getpid(), spec)
        try:
            async with asyncio.TaskGroup() as tasks:
                answering = tasks.create_task(answer())
                reason = await watchdog.run()
                answering.cancel()
            return reason
        finally:
            context.destroy(linger=0)

    assert "no heartbeat for" in run(main())


@pytest.mark.slow
@on_uvloop
async def test_heartbeats_distinguish_idle_blocked_and_stopped(actor: ActorProcess) -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(actor.heartbeat_endpoint)

    async def beat(timeout_s: float) -> float:
        """Age of the loop's last tick."""
        async with asyncio.timeout(timeout_s):
            await socket.send(b"")
            incarnation, age_s, _stalled_s = msgpack.unpackb(await socket.recv())
        assert incarnation == 1
        return float(age_s)

    try:
        async with connected(actor.ref) as probe:
            await probe.call("pid", timeout_s=30.0)
            while await beat(5.0) >= 1.0:
                pass

            async with asyncio.TaskGroup() as tasks:
                blocking = tasks.create_task(probe.call("block", 3.0, timeout_s=60.0))
                while await beat(5.0) <= 1.0:
                    assert not blocking.done()
                    await asyncio.sleep(0.05)

            actor.stop()
            with pytest.raises(TimeoutError):
                await beat(1.0)
            actor.send_signal(signal.SIGCONT)
            async with asyncio.timeout(30.0):
                await socket.recv()
            assert await probe.call("echo", "back", timeout_s=30.0) == "back"
    finally:
        socket.close()
        context.term()
