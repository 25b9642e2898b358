"""What an actor's heartbeat tells of its loop."""

from __future__ import annotations

import asyncio
import signal

import msgpack
import pytest
import zmq
import zmq.asyncio
from rpc_fixtures import *  # noqa: F403 - the fixtures
from rpc_process import ActorProcess, connected, run

pytestmark = pytest.mark.process


@pytest.mark.slow
def test_heartbeats_tell_idle_blocked_and_stopped_apart(actor: ActorProcess) -> None:
    async def main() -> None:
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
                await probe.call("pid", timeout_s=5.0)
                assert await beat(5.0) < 1.0

                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(probe.call("block", 2.0, timeout_s=20.0))
                    await asyncio.sleep(1.5)
                    assert await beat(5.0) > 1.0

                actor.stop()
                with pytest.raises(TimeoutError):
                    await beat(1.0)
                actor.send_signal(signal.SIGCONT)
                async with asyncio.timeout(5.0):
                    await socket.recv()
                assert await probe.call("echo", "back", timeout_s=5.0) == "back"
        finally:
            socket.close()
            context.term()

    run(main())
