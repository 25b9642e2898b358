"""Calls that their deadline or their caller ends early end at the callee too."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgpack
import pytest
import zmq
import zmq.asyncio
from raw_socket import RawSocket, receive_result
from rpc_fixtures import *  # noqa: F403 - the fixtures
from rpc_process import (
    AT_ONCE_S,
    ActorProcess,
    connected,
    count,
    make_ref,
    on_uvloop,
    run,
    until_count,
)

from umbra.runtime.errors import DeadlineExceeded
from umbra.runtime.rpc.wire import CALL, CANCEL, RESULT, WELCOME

pytestmark = pytest.mark.process


@on_uvloop
async def test_the_deadline_ends_the_call_and_cancels_the_callee(actor: ActorProcess) -> None:
    async with connected(actor.ref) as probe:
        before = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"probe#1@node\.sleep did not answer"):
            await probe.call("sleep", 3600, timeout_s=0.3)
        assert 0.25 < time.monotonic() - before < 0.3 + AT_ONCE_S
        await until_count(probe, "sleep cancelled", 1, AT_ONCE_S)


@on_uvloop
async def test_a_missed_deadline_is_never_reported_as_the_callees_error(
    shared: ActorProcess,
) -> None:
    async with connected(shared.ref) as probe:
        outcomes = await asyncio.gather(
            *[probe.call("sleep", 3600, timeout_s=0.1 + idx * 0.00037) for idx in range(200)],
            return_exceptions=True,
        )
    assert {type(outcome) for outcome in outcomes} == {DeadlineExceeded}


@on_uvloop
async def test_a_call_with_no_time_left_is_not_sent(actor: ActorProcess) -> None:
    async with connected(actor.ref) as probe:
        for timeout_s in (0.0, -1.0):
            with pytest.raises(DeadlineExceeded):
                await probe.call("append", 1, timeout_s=timeout_s)
        for timeout_s in (float("inf"), float("nan")):
            with pytest.raises(ValueError, match="timeout_s"):
                await probe.call("append", 1, timeout_s=timeout_s)
        assert await count(probe, "appended") == 0


@on_uvloop
async def test_a_call_carries_the_time_that_connecting_has_left(folder: Path) -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    ref = make_ref(folder)
    socket.bind(ref.ipc_endpoint)
    async with connected(ref) as handle, asyncio.TaskGroup() as tasks:
        calling = tasks.create_task(handle.call("echo", 1, timeout_s=30.0))
        caller, _hello = await socket.recv_multipart()
        await asyncio.sleep(0.2)
        await socket.send(caller, zmq.SNDMORE)
        await socket.send(msgpack.packb([WELCOME, 1, []]))
        call = msgpack.unpackb((await socket.recv_multipart())[1])
        await socket.send(caller, zmq.SNDMORE)
        await socket.send(msgpack.packb([RESULT, call[1], "done"]))
        assert await calling == "done"
    context.destroy(linger=0)

    timeout_ms = call[6]
    assert 0 < timeout_ms < 29900


@on_uvloop
async def test_cancelling_the_caller_cancels_the_callee(actor: ActorProcess) -> None:
    async with connected(actor.ref) as probe, asyncio.TaskGroup() as tasks:
        calling = tasks.create_task(probe.call("sleep", 3600, timeout_s=50.0))

        await until_count(probe, "began to sleep", 1)
        calling.cancel()
        await until_count(probe, "sleep cancelled", 1, AT_ONCE_S)


def test_a_call_cancelled_before_it_began_leaves_no_coroutine_behind(actor: ActorProcess) -> None:
    with RawSocket(actor.ref) as socket:
        call = msgpack.packb([CALL, 7, 1, "sleep", [3600], {}, 5000, 0])
        socket.send(call + msgpack.packb([CANCEL, 7]))
        socket.send(msgpack.packb([CALL, 8, 1, "echo", ["after"], {}, 5000, 0]))
        assert receive_result(socket, 8) == "after"

    actor.end()
    assert "never awaited" not in actor.log()


@pytest.mark.slow
@on_uvloop
async def test_a_callee_that_cleans_up_slowly_may_finish(actor: ActorProcess) -> None:
    async with connected(actor.ref) as probe:
        with pytest.raises(DeadlineExceeded):
            await probe.call("cling", 2.5, timeout_s=0.1)
        await until_count(probe, "cleaned up", 1)


@pytest.mark.slow
def test_a_stopped_callers_call_ends_at_its_deadline(actor: ActorProcess) -> None:
    with RawSocket(actor.ref) as socket:
        socket.send(msgpack.packb([CALL, 1, 1, "sleep", [3600], {}, 200, 0]))

        async def main() -> None:
            async with connected(actor.ref) as probe:
                await until_count(probe, "sleep cancelled", 1, 5.0)

        run(main())
