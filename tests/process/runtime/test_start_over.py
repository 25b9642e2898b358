"""A supervisor when torchrun restarts the ranks, once and again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from actor_specs import PROGRAMS, actor

from umbra.runtime.cluster.run_requests import supervisor_ref
from umbra.runtime.errors import MailboxClosed
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.rpc.wire import ActorRef
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.settings import to_wire
from umbra.runtime.testing.factories import SessionFactory
from umbra.runtime.weights.sync_messages import SyncAbort, SyncBegin, encode

pytestmark = [pytest.mark.process, pytest.mark.slow]


def supervisor_of(session: Session) -> ActorRef:
    return supervisor_ref(socket.gethostname(), session.socket_dir)


async def attach(
    supervisor: ActorRef,
    incarnations: Sequence[int],
    before: Sequence[Any] = ("list_actors",),
    meanwhile: Callable[[], None] = lambda: None,
) -> list[str]:
    """Attaches as rank 0 of each incarnation at once; returns the first event that each gets.

    Args:
        before: a call to the supervisor right before that.
        meanwhile: is called while they are attached.
    """
    async with Client(supervisor.node_id) as client, asyncio.timeout(60.0):
        handle = client.handle(supervisor)
        await handle.call(*before)
        async with AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(
                    handle.stream("attach", 0, 1, os.getpid(), incarnation, True, timeout_s=None)
                )
                for incarnation in incarnations
            ]
            kinds = [(await anext(events))["kind"] for events in streams]
            await asyncio.to_thread(meanwhile)
            await handle.call("detach", 0)
            async for _ in streams[-1]:
                pass
        return kinds


def test_ranks_that_are_restarted_while_they_start_over_are_attached(
    umbra_session_factory: SessionFactory,
) -> None:
    session = umbra_session_factory()
    stubborn = session.spawn(actor("Echo", grace_s=1.0))
    stubborn.call("ignore_sigterm")  # so that starting over takes its grace

    kinds = asyncio.run(attach(supervisor_of(session), (2, 3)))

    assert kinds == ["attached", "attached"]
    log = (umbra_session_factory.run_dirs[0] / "logs" / "supervisor.log").read_text()
    assert "Traceback" not in log


def test_engines_of_a_sync_that_is_being_undone_stay_warm(
    umbra_session_factory: SessionFactory,
) -> None:
    session = umbra_session_factory()
    pool = session.create_pool(
        PoolSpec(
            name="policy",
            engine="slow_engine:SlowEngine",
            count=1,
            kwargs={"update_s": 1.5},
            env={"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        )
    )
    publisher = WeightPublisher(session, {"w": torch.zeros(10)})
    publisher.publish("policy", 1, 20.0)
    manifest = publisher.manifest.to_wire()
    begin = SyncBegin(
        pool="policy",
        version=2,
        rank=0,
        world_size=1,
        manifest=manifest,
        offers={"cuda_ipc": "it has no GPU", "tcp": ""},
        node_id=session.node_id,
        deadline=time.monotonic() + 60.0,
    )
    sync_id = session.sync(begin).sync_id
    deadline = time.monotonic() + 60.0
    killed = SyncAbort(sync_id=sync_id, rank=0, reason="it was killed", deadline=deadline)
    abort = ("sync", encode(killed))
    states: list[tuple[str, int]] = []

    def look() -> None:
        pool.pause()  # which waits for the end of the sync
        (row,) = pool.states()
        states.append((row["state"], row["incarnation"]))

    asyncio.run(attach(supervisor_of(session), (2,), abort, look))

    assert states == [("PENDING_WEIGHTS", 1)]
    log = (umbra_session_factory.run_dirs[0] / "logs" / "supervisor.log").read_text()
    assert "killing" not in log


async def restart_before_the_last_has_gone(supervisor: ActorRef, last_pid: int) -> list[str]:
    """Rank 1 of the first incarnation ends once rank 0 of the second is attached. Returns the kinds
    of events that the latter gets until its farewell."""
    kinds: list[str] = []
    async with Client(supervisor.node_id) as client, asyncio.timeout(60.0):
        handle = client.handle(supervisor)
        old = handle.stream("attach", 1, 2, last_pid, 1, True, timeout_s=None)
        new = handle.stream("attach", 0, 1, os.getpid(), 2, True, timeout_s=None)
        async with old as old_events:
            await anext(old_events)
            async with new as events:
                kinds.append((await anext(events))["kind"])
                os.kill(last_pid, signal.SIGKILL)
                async for _ in old_events:
                    pass
                await handle.call("detach", 0)
                kinds += [event["kind"] async for event in events]
    return kinds


def test_a_rank_that_goes_after_the_restart_does_not_fail_the_next_ones(
    umbra_session_factory: SessionFactory,
) -> None:
    session = umbra_session_factory()
    with subprocess.Popen(["sleep", "60"]) as last:
        kinds = asyncio.run(restart_before_the_last_has_gone(supervisor_of(session), last.pid))

    assert kinds == ["attached"]


async def spawn_once_it_is_over(supervisor: ActorRef) -> None:
    async with Client(supervisor.node_id) as client, asyncio.timeout(60.0):
        handle = client.handle(supervisor)
        await handle.call("detach", 0)
        await handle.call("spawn", to_wire(actor("Echo")), timeout_s=60.0)


def test_what_is_spawned_while_the_job_ends_does_not_hold_it_up(
    umbra_session_factory: SessionFactory,
) -> None:
    session = umbra_session_factory()
    stubborn = session.spawn(actor("Echo", grace_s=2.0))
    stubborn.call("ignore_sigterm")

    with pytest.raises(MailboxClosed, match="the job is over"):
        asyncio.run(spawn_once_it_is_over(supervisor_of(session)))


def test_a_node_that_gets_no_new_ranks_ends_its_engines(tmp_path: Path, socket_root: Path) -> None:
    """As one that is cut off, whose torchrun waits for the others."""
    socket_root.mkdir()
    program = str(PROGRAMS / "cut_off_supervisor.py")

    with subprocess.Popen(["sleep", "60"]) as rank:
        arguments = [str(tmp_path), str(socket_root), str(rank.pid)]
        subprocess.run([sys.executable, program, *arguments], check=True, timeout=60.0)
