"""An actor on another node: both supervisors' parts, with an actor that has no process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq
from async_tests import on_a_loop
from local_actors import lone_node

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.job_rules import JobRules
from umbra.runtime.actor.node_actors import ActorCalls, NodeActors
from umbra.runtime.actor.remote_actor import HostedActors, RemoteActor
from umbra.runtime.actor.supervised_actor import ActorState, SupervisedActor
from umbra.runtime.cluster.job_links import JobLinks
from umbra.runtime.cluster.job_nodes import JobNode
from umbra.runtime.errors import ActorDied, ActorNotFound, ProtocolError
from umbra.runtime.pools.job_pools import JobPools, PoolCalls
from umbra.runtime.rpc.rpc_server import ActorServer
from umbra.runtime.rpc.wire import ActorRef

SPEC = ActorSpec(name="policy-0", target="module:Engine", role="engine")
EPOCH = 2


class AskedRules(JobRules):
    """Notes that it was asked what outlives a lost supervisor."""

    def __init__(self, *, nodes_may_change: bool) -> None:
        super().__init__(nodes_may_change=nodes_may_change)
        self.asked = asyncio.Event()

    def outlives_pools(self, actor: Any) -> bool:
        self.asked.set()
        return super().outlives_pools(actor)


class Noted(SupervisedActor):
    """Notes commands in place of obeying them."""

    commands: asyncio.Queue[object]
    has_to_end: asyncio.Event

    def stop(self) -> None:
        super().stop()
        self.has_to_end.set()

    def kill(self, reason: str) -> None:
        self.commands.put_nowait(("kill", reason))

    async def failed_to_wake(self) -> None:
        self.commands.put_nowait("failed_to_wake")

    def woke(self) -> None:
        self.commands.put_nowait("woke")

    async def restart(self, timeout_s: float) -> ActorRef:
        self.commands.put_nowait(("restart", timeout_s))
        assert self.ref is not None
        return self.ref


@dataclass
class Pair:
    """A remote actor, the actor there, and what the first has become after each change."""

    remote: RemoteActor
    actor: Noted
    hosted: HostedActors
    rules: AskedRules
    permit: asyncio.Event
    may_start: asyncio.Event
    ref: ActorRef
    changes: asyncio.Queue[tuple[str, int, bool]]

    async def enter(self, state: ActorState, **facts: Any) -> tuple[str, int, bool]:
        """Moves the actor there; (state, incarnation, has_process) of the remote one after it."""
        self.actor.state = state
        for name, value in facts.items():
            setattr(self.actor, name, value)
        self.hosted.on_actor_change(self.actor)
        return await self.changes.get()


@asynccontextmanager
async def pair(
    folder: Path, *, epoch: int = EPOCH, elastic: bool = False
) -> AsyncGenerator[tuple[Pair, asyncio.Task[None]]]:
    with lone_node(folder) as node, node.sockets.socket(zmq.ROUTER) as address:
        actor, permits = Noted(SPEC, node, lambda _: None), list[asyncio.Event]()
        actor.commands, actor.has_to_end = asyncio.Queue(), asyncio.Event()

        def start(spec: ActorSpec, may_start: asyncio.Event) -> SupervisedActor:
            assert spec == SPEC
            permits.append(may_start)
            return actor

        rules, links = AskedRules(nodes_may_change=elastic), JobLinks(node.client)
        hosted = HostedActors(start, rules)
        nobody = SimpleNamespace(on_node_event=None, on_node_lost=None, on_node_left=None)
        calls = ActorCalls(
            cast("NodeActors", SimpleNamespace(hosted=hosted)),
            links,
            lambda _: None,
            lambda _: None,
        )
        pools = PoolCalls(cast("JobPools", None), links)
        server = ActorServer([calls, pools], 1)
        endpoint = server.bind(address, f"ipc://{folder}/supervisor")
        ref = ActorRef(name="supervisor", incarnation=1, node_id="n", ipc_endpoint=endpoint)
        async with asyncio.timeout(30.0), node.client, asyncio.TaskGroup() as tasks:
            me = JobNode(node_id="n", num_ranks=1)
            links.begin([me], 0, EPOCH, cast("Any", nobody), tasks)
            assert await links.connect(EPOCH, (), 1.0, tasks)
            serving = tasks.create_task(server.run())
            may_start, changes = asyncio.Event(), asyncio.Queue[tuple[str, int, bool]]()

            def note(remote: RemoteActor) -> None:
                changes.put_nowait((str(remote.state), remote.incarnation, remote.has_process))

            remote = RemoteActor(SPEC, node.client.handle(ref), epoch, may_start, note)
            both = Pair(remote, actor, hosted, rules, asyncio.Event(), may_start, ref, changes)
            assert (remote.incarnation, remote.pid, remote.num_restarts) == (0, 0, 0)
            running = tasks.create_task(remote.run())
            first = await changes.get()
            if epoch == EPOCH:
                assert first == ("STARTING", 0, False)
                (both.permit,) = permits
            yield both, running
            running.cancel()
            links.start_over()
            serving.cancel()


@on_a_loop
async def test_an_actor_starts_by_permit_obeys_and_is_followed_to_its_end(tmp_path: Path) -> None:
    async with pair(tmp_path) as (both, running):
        remote, actor = both.remote, both.actor
        for _ in range(2):  # what was asked before the second is obeyed by then
            remote.woke()
            assert await actor.commands.get() == "woke"
        assert not both.permit.is_set()
        both.may_start.set()
        await both.permit.wait()
        assert (remote.incarnation, remote.has_process) == (1, True)

        started = await both.enter(ActorState.STARTING, incarnation=1, has_process=True, pid=7)
        assert (started, both.permit.is_set()) == (("STARTING", 1, True), True)
        assert not remote.has_run
        runs = await asyncio.gather(
            remote.wait_running(20.0), both.enter(ActorState.RUNNING, ref=both.ref)
        )
        assert runs == [both.ref, ("RUNNING", 1, True)]
        assert not both.permit.is_set(), "it was for one process"
        assert (remote.pid, remote.num_restarts, remote.has_run) == (7, 0, True)

        assert await remote.restart(5.0) == both.ref
        remote.kill("it hangs")
        await remote.failed_to_wake()
        remote.woke()
        remote.incarnation = 3
        remote.kill("another process")
        ended = await both.enter(ActorState.STARTING, ref=None, has_process=False)
        assert ended == ("STARTING", 1, False)
        await both.permit.wait()
        assert remote.incarnation == 2
        again = await both.enter(ActorState.RUNNING, incarnation=2, ref=both.ref, has_process=True)
        assert again == ("RUNNING", 2, True)
        assert (remote.num_restarts, actor.is_stopping) == (1, False)
        obeyed = [actor.commands.get_nowait() for _ in range(actor.commands.qsize())]
        assert obeyed == [("restart", 5.0), ("kill", "it hangs"), "failed_to_wake", "woke"]

        for _ in range(2):
            remote.stop()
        await actor.has_to_end.wait()
        await both.enter(ActorState.STOPPED, ref=None, has_process=False)
        await running
        assert remote.ended.is_set()
        assert SPEC.name not in both.hosted
        with pytest.raises(ActorDied, match="policy-0 was stopped"):
            await remote.wait_running(1.0)
        with pytest.raises(ActorNotFound, match="no other node has an actor 'policy-0' here"):
            await both.hosted.command("stop", SPEC.name)


@on_a_loop
async def test_an_actor_that_is_stopped_before_it_may_start_gets_no_permit(tmp_path: Path) -> None:
    async with pair(tmp_path) as (both, running):
        both.remote.stop()
        await both.actor.has_to_end.wait()
        stopped = await asyncio.gather(running, both.enter(ActorState.STOPPED))

        assert stopped == [None, ("STOPPED", 0, False)]
        assert not both.permit.is_set()


@pytest.mark.parametrize("elastic", [False, True])
@on_a_loop
async def test_an_actor_whose_other_supervisor_is_lost_ends_unless_the_next_pools_can_use_it(
    tmp_path: Path, elastic: bool
) -> None:
    async with pair(tmp_path, elastic=elastic) as (both, running):
        await both.enter(ActorState.RUNNING, incarnation=1, ref=both.ref, has_process=True)
        with pytest.raises(ProtocolError, match="not a command to an actor: 'dance'"):
            await both.hosted.command("dance", SPEC.name)
        running.cancel()
        await both.rules.asked.wait()

        assert (SPEC.name in both.hosted, both.actor.is_stopping) == (False, not elastic)


@on_a_loop
async def test_what_a_supervisor_of_an_earlier_epoch_asks_is_refused(tmp_path: Path) -> None:
    async with pair(tmp_path, epoch=1) as (both, running):
        await running
        assert both.remote.state == ActorState.FAILED
        why = "policy-0 could not be started: the nodes have met again: epoch 1 is not 2"
        assert both.remote.failure == why
        there = both.remote._there  # pyright: ignore[reportPrivateUsage]
        for method, *arguments in (
            ("command_hosted", 1, "stop", "policy-0"),
            ("end_warm", 1, ["policy-0"]),
        ):
            with pytest.raises(ActorNotFound, match="epoch 1 is not 2"):
                await there.call(str(method), *arguments, timeout_s=10.0)
        async with there.stream("hold_image", 1, {}, timeout_s=10.0) as states:
            with pytest.raises(ActorNotFound, match="epoch 1 is not 2"):
                await anext(states)
