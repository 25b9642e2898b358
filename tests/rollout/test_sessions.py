"""Runs of agent loops: what a caller that goes away leaves of its generation."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from rollout_samples import make_trajectory
from test_dispatch import A, Bench, delta

from umbra.runtime.errors import RolloutError
from umbra.runtime.rollout.group import Group
from umbra.runtime.rollout.sessions import AgentSessions

PROMPT = np.asarray([1, 2, 3], np.int32)


class Loop:
    """One trajectory of an agent loop that generates on one engine."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.inbox = self.bench.serve(A)
        self.sessions = AgentSessions(self.bench.dispatcher, [])
        self.trajectory = make_trajectory(PROMPT.tolist())
        self.group = Group("e0/p", [self.trajectory])

    def open(self) -> int:
        return self.sessions.open(self.trajectory, self.group, 1.0)

    async def begin(self, session: int) -> asyncio.Task[dict[str, Any]]:
        """A generation of 5 tokens that the engine has been asked for."""
        task = asyncio.get_running_loop().create_task(self.sessions.generate(session, PROMPT, 5))
        await asyncio.sleep(0)
        return task

    def stream(self, request: int, num_tokens: int) -> None:
        """What the engine sends for the request that it got as number `request`."""
        request_id = self.inbox.requests[request]["id"]
        self.bench.dispatcher.on_batch(A, delta([(request_id, 0, range(10, 10 + num_tokens), 0)]))

    def finish(self, request: int) -> None:
        request_id = self.inbox.requests[request]["id"]
        self.bench.dispatcher.on_batch(A, delta([], [(request_id, "length")]))


async def _life_that_is_lost_while_it_generates(*, caller_leaves_first: bool) -> None:
    loop = Loop()
    first = await loop.begin(loop.open())
    loop.stream(0, 2)
    if caller_leaves_first:  # else the manager hears of the death before its server does
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    session = loop.open()

    loop.stream(0, 5)
    second = await loop.begin(session)
    loop.stream(1, 5)
    loop.finish(1)

    assert (await second)["tokens"].tolist() == [10, 11, 12, 13, 14]
    assert loop.inbox.withdrawn == [loop.inbox.requests[0]["id"]]
    assert loop.bench.dispatcher.num_inflight(A) == 0
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize("caller_leaves_first", [True, False])
def test_a_lost_life_adds_nothing_to_the_next_one(caller_leaves_first: bool) -> None:
    asyncio.run(_life_that_is_lost_while_it_generates(caller_leaves_first=caller_leaves_first))


def test_an_answer_is_what_there_was_when_the_generation_ended() -> None:
    async def run() -> None:
        loop = Loop()
        first = await loop.begin(loop.open())
        loop.stream(0, 5)
        loop.finish(0)
        session = loop.open()  # before the answer has left

        assert (await first)["tokens"].tolist() == [10, 11, 12, 13, 14]
        assert (loop.trajectory.completion_len, loop.trajectory.finish_reason) == (0, "")
        with pytest.raises(RolloutError, match="two generate"):
            await asyncio.gather(
                loop.sessions.generate(session, PROMPT, 5),
                loop.sessions.generate(session, PROMPT, 5),
            )

    asyncio.run(run())
