"""Calls to a peer that goes away, comes back or is not there yet: each has exactly one outcome."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import zmq
from rpc_fixtures import *  # noqa: F403 - the fixtures
from rpc_process import (
    AT_ONCE_S,
    ActorProcess,
    connected,
    count,
    make_ref,
    on_uvloop,
    read_all,
    run,
    until_count,
)

from umbra.runtime.errors import ActorNotFound, ConnectionLost, DeadlineExceeded, MailboxClosed
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.rpc.rpc_server import ActorServer
from umbra.runtime.rpc.wire import ActorRef

pytestmark = pytest.mark.process


@on_uvloop
async def test_a_killed_peer_is_lost_at_once(actor: ActorProcess) -> None:
    async with connected(actor.ref) as probe, asyncio.TaskGroup() as tasks:

        async def call() -> None:
            with pytest.raises(ConnectionLost, match="probe#1@node"):
                await probe.call("sleep", 3600, timeout_s=50.0)

        async def listen() -> None:
            with pytest.raises(ConnectionLost):
                await read_all(probe, "silence", timeout_s=50.0)

        for _ in range(20):
            tasks.create_task(call())
        tasks.create_task(listen())
        await until_count(probe, "began to sleep", 20)
        actor.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
    assert time.monotonic() - killed_at < AT_ONCE_S


@pytest.mark.slow
def test_an_answer_given_before_the_end_is_not_lost(folder: Path) -> None:
    async def main(actor: ActorProcess) -> None:
        async with connected(actor.ref) as probe:
            await probe.call("pid", timeout_s=30.0)
            async with asyncio.TaskGroup() as tasks:
                answer = tasks.create_task(probe.call("answer_and_exit", 42, timeout_s=60.0))
                await asyncio.sleep(0)
                # While this loop does not look, the answer and the end of the peer both arrive.
                actor.wait()
            assert answer.result() == 42

    for incarnation in range(1, 4):
        with ActorProcess(folder, incarnation) as actor:
            run(main(actor))


@on_uvloop
async def test_a_stream_that_ended_is_whole_although_its_peer_is_gone(actor: ActorProcess) -> None:
    async with connected(actor.ref) as probe:
        async with probe.stream("numbers", 10, timeout_s=60.0, credits=16) as items:
            received = [await anext(items)]
            await until_count(probe, "stream closed", 1)
            actor.send_signal(signal.SIGKILL)
            with pytest.raises(ConnectionLost):
                await probe.call("sleep", 3600, timeout_s=60.0)
            received += [item async for item in items]
        assert received == list(range(10))


def test_an_actor_that_is_gone_is_lost_at_once_for_new_callers_too(actor: ActorProcess) -> None:
    actor.send_signal(signal.SIGKILL)
    actor.wait()

    async def main() -> None:
        async with connected(actor.ref) as probe:
            before = time.monotonic()
            with pytest.raises(ConnectionLost, match="nothing listens"):
                await probe.call("echo", 1, timeout_s=30.0)
            assert time.monotonic() - before < AT_ONCE_S

    run(main())


@pytest.mark.slow
@on_uvloop
async def test_a_vanished_callers_call_is_cancelled(actor: ActorProcess) -> None:
    async with connected(actor.ref) as probe:
        async with connected(actor.ref) as other, asyncio.TaskGroup() as tasks:

            async def call() -> None:
                with pytest.raises(MailboxClosed):
                    await other.call("sleep", 3600, timeout_s=50.0)

            tasks.create_task(call())
            await until_count(probe, "began to sleep", 1)
            other._client.close()  # pyright: ignore[reportPrivateUsage]
        await until_count(probe, "sleep cancelled", 1, 5.0)


@on_uvloop
async def test_a_closed_client_refuses_calls(shared: ActorProcess) -> None:
    async with connected(shared.ref) as probe:
        await probe.call("pid", timeout_s=30.0)
    with pytest.raises(MailboxClosed):
        await probe.call("pid", timeout_s=30.0)


def test_a_call_for_an_earlier_incarnation_is_refused(folder: Path) -> None:
    with ActorProcess(folder, incarnation=2) as actor:
        stale = ActorRef(
            name="probe", incarnation=1, node_id="node", ipc_endpoint=actor.ref.ipc_endpoint
        )

        async def main() -> None:
            async with connected(stale) as probe:
                with pytest.raises(ActorNotFound, match=r"incarnation 2 is here.* was for 1"):
                    await probe.call("append", 1, timeout_s=30.0)
            async with connected(actor.ref) as probe:
                assert await count(probe, "appended") == 0

        run(main())


class Restarter:
    """What a supervisor does for its clients: names the live incarnation, late."""

    def __init__(self, folder: Path, num_stale_answers: int) -> None:
        self._folder = folder
        self._num_stale_left = num_stale_answers
        self.current = ActorProcess(folder, 1)

    async def resolve(self, lost: ActorRef, timeout_s: float) -> ActorRef:
        del lost, timeout_s
        if self._num_stale_left:
            self._num_stale_left -= 1
            return make_ref(self._folder, 1)
        if self.current.ref.incarnation == 1:
            self.current.wait()
            self.current = ActorProcess(self._folder, 2).__enter__()
        return self.current.ref


@pytest.mark.slow
@pytest.mark.parametrize("num_stale_answers", [0, 2])
def test_an_idempotent_call_is_retried_on_the_next_incarnation(
    folder: Path, num_stale_answers: int
) -> None:
    restarter = Restarter(folder, num_stale_answers)
    with restarter.current:

        async def main() -> None:
            async with Client("node") as client:
                probe = client.handle(restarter.current.ref, restarter.resolve)
                marker = str(folder / "died")
                assert await probe.call("die_the_first_time", marker, timeout_s=30.0) == "lived"
                assert probe.ref.incarnation == 2

        try:
            run(main())
        finally:
            restarter.current.end()


def test_a_call_that_is_not_idempotent_is_not_retried_but_the_next_one_finds_the_actor(
    folder: Path,
) -> None:
    restarter = Restarter(folder, num_stale_answers=0)
    with restarter.current:

        async def main() -> None:
            async with Client("node") as client:
                probe = client.handle(restarter.current.ref, restarter.resolve)
                marker = str(folder / "died")
                with pytest.raises(ConnectionLost):
                    await probe.call("die_the_first_time_for_good", marker, timeout_s=30.0)
                assert await probe.call("echo", "again", timeout_s=30.0) == "again"
                assert probe.ref.incarnation == 2

        try:
            run(main())
        finally:
            restarter.current.end()


@on_uvloop
async def test_a_callee_that_lost_a_peer_of_its_own_is_not_called_again(
    actor: ActorProcess,
) -> None:
    async def resolve(lost: ActorRef, timeout_s: float) -> ActorRef:
        del lost, timeout_s
        return actor.ref

    async with Client("node") as client:
        probe = client.handle(actor.ref, resolve)
        with pytest.raises(ConnectionLost, match="third party"):
            await probe.call("lose_a_peer_of_its_own", timeout_s=3.0)
        assert await count(probe, "lost a peer") == 1


class Recorder:
    """An actor served inside the test's own process, to choose the moment it starts."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def note(self, text: str) -> str:
        self.seen.append(text)
        return text


@on_uvloop
async def test_a_call_that_arrives_before_the_server_runs_is_answered(folder: Path) -> None:
    server = ActorServer([Recorder()], 1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ref = make_ref(folder)
    server.bind(context.socket(zmq.ROUTER), ref.ipc_endpoint)
    async with connected(ref) as handle, asyncio.TaskGroup() as tasks:
        early = tasks.create_task(handle.call("note", "early", timeout_s=30.0))
        await asyncio.sleep(0.2)
        serving = tasks.create_task(server.run())
        assert await early == "early"
        serving.cancel()
    context.term()


def test_a_call_that_ends_before_its_peer_listens_never_runs(folder: Path) -> None:
    recorder = Recorder()

    async def main() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        ref = make_ref(folder)
        async with Client("node") as client, asyncio.TaskGroup() as tasks:
            handle = client.handle(ref, awaits_start=True)
            with pytest.raises(DeadlineExceeded):
                await handle.call("note", "too late", timeout_s=0.2)
            server = ActorServer([recorder], 1)
            server.bind(context.socket(zmq.ROUTER), ref.ipc_endpoint)
            serving = tasks.create_task(server.run())
            assert await handle.call("note", "in time", timeout_s=30.0) == "in time"
            serving.cancel()
        context.term()

    run(main())
    assert recorder.seen == ["in time"]


def test_sigterm_ends_an_actor_with_running_calls_cleanly(actor: ActorProcess) -> None:
    async def main() -> None:
        async with connected(actor.ref) as probe, asyncio.TaskGroup() as tasks:

            async def call() -> None:
                with pytest.raises(ConnectionLost):
                    await probe.call("sleep", 3600, timeout_s=50.0)

            tasks.create_task(call())
            await until_count(probe, "began to sleep", 1)
            actor.send_signal(signal.SIGTERM)

    run(main())
    assert actor.wait() == 128 + signal.SIGTERM
    assert "Traceback" not in actor.log()


def test_callers_that_got_a_large_answer_cost_no_memory(actor: ActorProcess) -> None:
    async def call_once(num_bytes: int) -> None:
        async with connected(actor.ref) as probe:
            assert len(await probe.call("echo", "x" * num_bytes)) == num_bytes

    def resident_mib() -> int:
        pages = int(Path(f"/proc/{actor.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") >> 20

    run(call_once(1 << 20))
    before = resident_mib()

    for _ in range(30):
        run(call_once(1 << 20))

    assert resident_mib() - before < 15


@on_uvloop
async def test_a_client_holds_connections_to_hundreds_of_actors(folder: Path) -> None:
    async with Client("node") as client:
        for idx in range(1, 401):  # libzmq's default allows 341
            client.connection(make_ref(folder, incarnation=idx), awaits_start=True)
