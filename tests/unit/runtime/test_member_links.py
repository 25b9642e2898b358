"""The lead's links to its members, without a network, and a member's link to the lead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import zmq
from async_tests import on_a_loop

from umbra.runtime.cluster.job_nodes import JobNode
from umbra.runtime.cluster.node_link import LeadLink, MemberLinks
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.rpc.rpc_server import ActorServer
from umbra.runtime.rpc.wire import ActorRef


@on_a_loop
async def test_a_machine_comes_while_the_lead_waits_for_a_node_and_goes_while_it_leaves() -> None:
    has_left = asyncio.Event()
    nodes = [JobNode(node_id=f"node-{idx}", num_ranks=1) for idx in range(2)]
    links = MemberLinks(
        nodes, lambda idx, event: None, lambda idx, why: None, lambda idx: has_left.set()
    )

    async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(links.run())
        waiting = tasks.create_task(links.wait_joined(10.0))
        await asyncio.sleep(0)
        links.admit(2, JobNode(node_id="generates", num_ranks=0))
        events_for_1 = links.join(1, [])
        assert await anext(events_for_1) == {"kind": "beat"}
        await waiting

        leaving = tasks.create_task(links.leave())
        await asyncio.sleep(0)
        links.report(2, {"kind": "left"})
        await has_left.wait()
        assert await anext(events_for_1) == {"kind": "left"}
        reading_on = tasks.create_task(anext(events_for_1))
        await leaving
        reading_on.cancel()
        watching.cancel()


class Lead:
    """Sends events of these kinds to each member, and ends."""

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds

    async def join(self, epoch: int, node: int, warm: object) -> AsyncGenerator[dict[str, str]]:
        for kind in self._kinds:
            yield {"kind": kind}


@pytest.mark.parametrize(
    ("kinds", "lost"), [(("beat", "fault"), [(0, "it ended")]), (("fault", "left"), [])]
)
@on_a_loop
async def test_a_lead_that_ends_without_having_left_is_lost(
    tmp_path: Path, kinds: tuple[str, ...], lost: list[tuple[int, str]]
) -> None:
    events, losses = list[tuple[int, str]](), list[tuple[int, str]]()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = ActorServer([Lead(*kinds)], 1)
    endpoint = server.bind(context.socket(zmq.ROUTER), f"ipc://{tmp_path}/lead")
    ref = ActorRef(name="lead", incarnation=1, node_id="n", ipc_endpoint=endpoint)

    async with asyncio.timeout(30.0), Client("n") as client, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.run())
        link = LeadLink(
            *(client.handle(ref), 1, 1, ()),
            on_event=lambda idx, event: events.append((idx, event["kind"])),
            on_lost=lambda idx, why: losses.append((idx, why)),
        )
        await link.run()
        serving.cancel()
    context.term()

    assert (events, losses) == ([(0, "fault")], lost)
