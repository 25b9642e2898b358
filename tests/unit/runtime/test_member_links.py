"""The lead's links to its members, without a network."""

from __future__ import annotations

import asyncio

from umbra.runtime.cluster.job_nodes import JobNode
from umbra.runtime.cluster.node_link import MemberLinks


def test_a_machine_comes_while_the_lead_waits_for_a_node_and_goes_while_it_leaves() -> None:
    has_left = asyncio.Event()
    nodes = [JobNode(node_id=f"node-{idx}", num_ranks=1) for idx in range(2)]
    links = MemberLinks(
        nodes, lambda idx, event: None, lambda idx, why: None, lambda idx: has_left.set()
    )

    async def come_and_go() -> None:
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

    asyncio.run(come_and_go())
