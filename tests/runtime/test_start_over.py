"""What a supervisor does when torchrun restarts the ranks, and restarts them again."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack

import pytest
from actor_specs import actor

from umbra.runtime.rpc.client import Client
from umbra.runtime.rpc.ref import ActorRef
from umbra.runtime.testing.sessions import SessionFactory

pytestmark = [pytest.mark.process, pytest.mark.slow]


async def attach_twice(supervisor: ActorRef) -> list[str]:
    """As rank 0 after one restart, and at once after the next; what each is told first."""
    async with Client(supervisor.node_id) as client, asyncio.timeout(20.0):
        handle = client.handle(supervisor)
        async with AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(
                    handle.stream("attach", 0, 1, os.getpid(), incarnation, True, timeout_s=None)
                )
                for incarnation in (2, 3)
            ]
            kinds = [(await anext(events))["kind"] for events in streams]
            await handle.call("detach", 0)
            async for _ in streams[1]:
                pass
        return kinds


def test_ranks_that_are_restarted_while_they_start_over_are_attached(
    umbra_session_factory: SessionFactory,
) -> None:
    session = umbra_session_factory()
    stubborn = session.spawn(actor("Echo", grace_s=1.0))
    stubborn.call("ignore_sigterm")  # so that starting over takes its grace
    endpoint = f"ipc://{session.socket_dir / 'supervisor'}"
    supervisor = ActorRef(
        name="supervisor",
        incarnation=1,
        node_id=stubborn.ref.node_id,
        ipc_endpoint=endpoint,
    )

    kinds = asyncio.run(attach_twice(supervisor))

    assert kinds == ["attached", "attached"]
    log = (umbra_session_factory.run_dirs[0] / "logs" / "supervisor.log").read_text()
    assert "Traceback" not in log
