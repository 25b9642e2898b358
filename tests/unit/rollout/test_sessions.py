"""Runs of agent loops: a lost run leaves its records to the next one, which replays them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from async_tests import on_a_loop
from dispatch_bench import A, Bench, delta
from ledger_replay import replay
from rollout_samples import make_trajectory

from umbra.runtime.errors import LedgerError, RequestRefused, RolloutError, UmbraError
from umbra.runtime.rollout.agents.agent_sessions import AgentSessions
from umbra.runtime.rollout.dispatch.trajectory import Group
from umbra.runtime.rollout.ledger.ledger_history import read_history
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.rollout_config import SamplingOptions

PROMPT = np.asarray([1, 2, 3], np.int32)
AT_ONE = SamplingOptions(temperature=1.0)


class Loop:
    """One trajectory of an agent loop that generates on one engine.

    The token at completion position i is 10 + i, whoever generates it.
    """

    def __init__(
        self, vocab_size: int = 0, stop: Sequence[str] = (), recorder: Recorder | None = None
    ) -> None:
        self.bench = Bench(recorder=recorder, stop=stop)
        self.inbox = self.bench.serve(A)
        recorder = recorder or Recorder(None, self.bench.failures.append)
        self.sessions = AgentSessions(self.bench.dispatcher, recorder, vocab_size)
        self.trajectory = make_trajectory(PROMPT.tolist(), budget=100)
        self.group = Group("e0/p", [self.trajectory])

    def open(self, sampling: SamplingOptions = AT_ONE) -> int:
        return self.sessions.open(self.trajectory, self.group, sampling)

    async def begin(
        self, session: int, context: Sequence[int] = PROMPT.tolist()
    ) -> asyncio.Task[dict[str, Any]]:
        """A generation of 5 tokens that the engine has been asked for."""
        generating = self.sessions.generate(session, np.asarray(context, np.int32), 5)
        task = asyncio.get_running_loop().create_task(generating)
        await asyncio.sleep(0)
        return task

    def stream(self, request: int, num_tokens: int) -> None:
        """Delivers the engine's tokens for its request number `request`."""
        asked = self.inbox.requests[request]
        at = asked["position"]
        tokens = range(10 + at, 10 + at + num_tokens)
        self.bench.dispatcher.on_batch(A, delta([(asked["id"], at, tokens, 0)]))

    def finish(self, request: int) -> None:
        request_id = self.inbox.requests[request]["id"]
        self.bench.dispatcher.on_batch(A, delta([], [(request_id, "length")]))

    async def turn(self, session: int, context: Sequence[int]) -> list[int]:
        """A whole generation; by the engine unless it is replayed."""
        before = len(self.inbox.requests)
        task = await self.begin(session, context)
        if len(self.inbox.requests) > before:
            self.stream(before, self.inbox.requests[before]["max_new_tokens"])
            self.finish(before)
        tokens: list[int] = (await task)["tokens"].tolist()
        return tokens


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
    assert loop.inbox.requests[1]["position"] == 2, "what was there is kept"
    loop.stream(1, 3)
    loop.finish(1)

    assert (await second)["tokens"].tolist() == [10, 11, 12, 13, 14]
    assert loop.inbox.withdrawn == [loop.inbox.requests[0]["id"]]
    assert loop.bench.dispatcher.num_inflight(A) == 0
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize("caller_leaves_first", [True, False])
def test_a_lost_incarnation_adds_nothing_to_the_next_one(caller_leaves_first: bool) -> None:
    asyncio.run(_life_that_is_lost_while_it_generates(caller_leaves_first=caller_leaves_first))


@on_a_loop
async def test_an_answer_that_never_left_is_given_to_the_next_run() -> None:
    loop = Loop()
    first = await loop.begin(loop.open())
    loop.stream(0, 5)
    loop.finish(0)
    session = loop.open()  # before the answer has left

    assert (await first)["tokens"].tolist() == [10, 11, 12, 13, 14]
    assert await loop.turn(session, [1, 2, 3]) == [10, 11, 12, 13, 14]
    assert len(loop.inbox.requests) == 1


@on_a_loop
async def test_a_loop_generates_one_thing_at_a_time() -> None:
    loop = Loop()
    session = loop.open()
    with pytest.raises(RolloutError, match="two generate"):
        await asyncio.gather(
            loop.sessions.generate(session, PROMPT, 5),
            loop.sessions.generate(session, PROMPT, 5),
        )


@on_a_loop
async def test_all_generations_of_a_loop_are_sampled_as_its_run_is() -> None:
    loop = Loop()
    sampling = SamplingOptions(temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=[30])
    session = loop.open(sampling)
    turn = await loop.begin(session)
    side = asyncio.get_running_loop().create_task(
        loop.sessions.generate(session, PROMPT, 5, "adapter")
    )
    await asyncio.sleep(0)

    for request in loop.inbox.requests:
        assert sampling.request_fields().items() <= request.items()
    assert [request.get("lora") for request in loop.inbox.requests] == [None, "adapter"]
    for task in (turn, side):
        task.cancel()
    await asyncio.gather(turn, side, return_exceptions=True)


@on_a_loop
async def test_a_stop_text_ends_a_turn_and_does_not_count_where_it_was_given() -> None:
    loop = Loop(stop=["mn"])
    session = loop.open()  # the texts of tokens 12 and 13
    first = await loop.begin(session)
    loop.stream(0, 5)
    assert (await first)["tokens"].tolist() == [10, 11, 12, 13]
    assert (await first)["finish_reason"] == "stop"

    context = [1, 2, 3, 10, 11, 12, 13, 12, 13]
    assert await loop.turn(session, context) == [16, 17, 18, 19, 20]
    assert loop.trajectory.finish_reason == "length"


@pytest.mark.parametrize(
    ("context", "limit", "said"),
    [([], None, "got no tokens to continue"), ([1], 0, "got max_new_tokens = 0; use 1 or more")],
)
@on_a_loop
async def test_a_generation_of_nothing_is_refused(
    context: list[int], limit: int | None, said: str
) -> None:
    loop = Loop()
    with pytest.raises(RolloutError, match=said):
        await loop.sessions.generate(loop.open(), np.asarray(context, np.int32), limit)


@on_a_loop
async def test_a_loop_that_runs_again_gets_what_it_had_and_then_continues() -> None:
    loop = Loop()
    session = loop.open()
    first = [1, 2, 3, *await loop.turn(session, [1, 2, 3]), 70, 71]
    second = [*first, *await loop.turn(session, first), 72]
    third = await loop.begin(session, second)
    loop.stream(2, 2)
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)

    session = loop.open()
    assert [1, 2, 3, *await loop.turn(session, [1, 2, 3]), 70, 71] == first
    assert [*first, *await loop.turn(session, first), 72] == second
    assert len(loop.inbox.requests) == 3, "both were replayed"
    assert await loop.turn(session, second) == [23, 24, 25, 26, 27]
    assert loop.inbox.requests[3]["position"] == 15
    assert loop.sessions.num_replayed_turns == 2
    assert loop.trajectory.versions.tolist() == [0] * 5 + [-1] * 2 + [0] * 5 + [-1] + [0] * 5
    assert loop.trajectory.num_generated == 15


@on_a_loop
async def test_a_turn_that_was_lost_before_its_first_token_is_no_other_path() -> None:
    loop = Loop()
    session = loop.open()
    first = [1, 2, 3, *await loop.turn(session, [1, 2, 3]), 70, 71]
    lost = await loop.begin(session, first)
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)

    session = loop.open()
    assert [1, 2, 3, *await loop.turn(session, [1, 2, 3]), 70, 71] == first
    assert await loop.turn(session, first) == [17, 18, 19, 20, 21]

    assert loop.sessions.num_diverged == 0
    assert loop.trajectory.versions.tolist() == [0] * 5 + [-1] * 2 + [0] * 5


@on_a_loop
async def test_if_its_context_differs_later_tokens_are_discarded() -> None:
    loop = Loop()
    session = loop.open()
    first = [1, 2, 3, *await loop.turn(session, [1, 2, 3])]
    await loop.turn(session, [*first, 70, 71])

    session = loop.open()
    await loop.turn(session, [1, 2, 3])
    assert await loop.turn(session, [*first, 99]) == [16, 17, 18, 19, 20]
    assert loop.sessions.num_diverged == 1
    expected = [10, 11, 12, 13, 14, 99, 16, 17, 18, 19, 20]
    assert loop.trajectory.tokens.tolist() == expected
    assert loop.trajectory.num_generated == 10


@on_a_loop
async def test_a_context_too_long_for_the_model_is_no_part_of_the_trajectory() -> None:
    loop = Loop()
    for _ in range(2):  # the second is a replay
        session = loop.open()
        first = [1, 2, 3, *await loop.turn(session, [1, 2, 3])]
        said = [*first, *range(20, 20 + loop.trajectory.max_context_len)]

        answer = await loop.sessions.generate(session, np.asarray(said, np.int32), 5)

        assert (answer["tokens"].tolist(), answer["finish_reason"]) == ([], "length")
        assert loop.trajectory.finish_reason == "length"
        assert len(loop.trajectory) < 20
        assert await loop.turn(session, [*first, 20]) == [16, 17, 18, 19, 20]
    assert len(loop.inbox.requests) == 2


@on_a_loop
async def test_also_in_the_middle_of_a_generation() -> None:
    loop = Loop()
    session = loop.open()
    first = [1, 2, 3, *await loop.turn(session, [1, 2, 3])]
    second = await loop.begin(session, [*first, 70])
    loop.stream(1, 3)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)

    session = loop.open()
    await loop.turn(session, [1, 2, 3])
    await loop.turn(session, [*first, 80, 81])

    expected = [10, 11, 12, 13, 14, 80, 81, 17, 18, 19, 20, 21]
    assert loop.trajectory.tokens.tolist() == expected


@on_a_loop
async def test_a_prompt_of_the_loops_own_is_replayed_too() -> None:
    loop = Loop()
    assert await loop.turn(loop.open(), [7, 7]) == [10, 11, 12, 13, 14]

    session = loop.open()
    assert await loop.turn(session, [7, 7]) == [10, 11, 12, 13, 14]
    assert len(loop.inbox.requests) == 1
    assert loop.trajectory.prompt_tokens.tolist() == [7, 7]

    session = loop.open()
    await loop.turn(session, [8])
    assert loop.trajectory.prompt_tokens.tolist() == [8]


@on_a_loop
async def test_the_ledger_has_a_loops_own_prompt_on_another_path_too(tmp_path: Path) -> None:
    failures: list[UmbraError] = []
    async with Recorder(tmp_path, failures.append) as recorder:
        loop = Loop(recorder=recorder)
        recorder.admitted(loop.group, 0, 0)
        for said in (70, 80):
            session = loop.open()
            first = [7, 7, *await loop.turn(session, [7, 7])]
            await loop.turn(session, [*first, said])
        await recorder.durable()

    account = replay(read_history(tmp_path).entries).sample(loop.trajectory.uid)
    assert account.prompt is not None
    assert account.prompt.tolist() == [7, 7]
    assert account.tokens.tolist() == loop.trajectory.tokens.tolist()
    assert failures == []


def test_a_prompt_that_is_too_long_for_the_ledger_is_refused_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("umbra.runtime.rollout.ledger.ledger_events.BATCH_MAX_NBYTES", 1000)

    async def run() -> None:
        loop = Loop()
        session = loop.open()
        for _ in range(2):
            with pytest.raises(LedgerError, match=r"e0/p/0: a prompt of 300 .*max_context_len"):
                await loop.turn(session, [7] * 300)
        assert loop.trajectory.prompt_tokens.tolist() == [1, 2, 3]
        assert await loop.turn(session, [7] * 30) == [10, 11, 12, 13, 14]

    asyncio.run(run())


@on_a_loop
async def test_what_was_done_once_is_remembered() -> None:
    loop = Loop()
    session = loop.open()
    assert loop.sessions.recall(session, "pay") == []
    await loop.sessions.keep(session, "pay", {"id": 7})
    with pytest.raises(RolloutError, match="at the same time"):
        await loop.sessions.keep(session, "pay", {"id": 8})

    assert loop.sessions.recall(loop.open(), "pay") == [{"id": 7}]
    with pytest.raises(RolloutError, match="has ended"):
        loop.sessions.recall(session, "pay")


@on_a_loop
async def test_a_new_manager_replays_what_the_ledger_has_kept() -> None:
    loop = Loop()
    tokens = np.arange(10, 20, dtype=np.int32)
    loop.trajectory.append_generated(tokens, np.zeros(10, np.float32), 0)
    records = {"turn/1": [0, 5, "stop"], "once/pay": 3, "turn/2": [5, 9, "stop"]}
    # The second was discarded in a later run, and a token of the third came after a checkpoint.
    later = {"turn/3": [5, 8, "length"], "turn/4": [8, 12, "stop"]}
    loop.sessions.remember(loop.trajectory, records | later)

    session = loop.open()
    assert await loop.turn(session, [1, 2, 3]) == [10, 11, 12, 13, 14]
    assert await loop.turn(session, [1, 2, 3, 10, 11, 12, 13, 14]) == [15, 16, 17]
    assert loop.sessions.recall(session, "pay") == [3]
    context = [1, 2, 3, *range(10, 18)]
    assert await loop.turn(session, context) == [18, 19, 20, 21, 22]
    assert [request["position"] for request in loop.inbox.requests] == [10]


@on_a_loop
async def test_what_an_adapter_generates_is_no_part_of_the_trajectory() -> None:
    loop = Loop()
    session = loop.open()
    first = await loop.begin(session)
    context = np.asarray([9, 9], np.int32)
    aside = asyncio.get_running_loop().create_task(
        loop.sessions.generate(session, context, 2, "critic")
    )
    await asyncio.sleep(0)
    policy, adapted = loop.inbox.requests

    assert "lora" not in policy
    assert (adapted["lora"], adapted["tokens"].tolist()) == ("critic", [9, 9])
    assert adapted["max_new_tokens"] == 2
    loop.stream(1, 2)
    loop.finish(1)
    assert (await aside)["tokens"].tolist() == [10, 11]
    assert loop.trajectory.completion_len == 0
    loop.stream(0, 5)
    loop.finish(0)
    await first
    assert loop.trajectory.completion_len == 5


@on_a_loop
async def test_an_adapters_generation_ends_with_the_run_of_its_loop() -> None:
    loop = Loop()
    asking = loop.sessions.generate(loop.open(), PROMPT, 2, "critic")
    aside = asyncio.get_running_loop().create_task(asking)
    await asyncio.sleep(0)

    loop.open()

    with pytest.raises(RolloutError, match="has ended"):
        await aside
    assert loop.inbox.withdrawn == [loop.inbox.requests[0]["id"]]
    assert loop.bench.dispatcher.num_inflight(A) == 0


@on_a_loop
async def test_an_adapter_that_the_engine_does_not_have_fails_its_loop_only() -> None:
    loop = Loop()
    asking = loop.sessions.generate(loop.open(), PROMPT, 2, "nobody")
    aside = asyncio.get_running_loop().create_task(asking)
    await asyncio.sleep(0)

    request = loop.inbox.requests[0]["id"]
    loop.bench.dispatcher.refuse(A, request, RequestRefused("there is no adapter"))

    with pytest.raises(RolloutError, match="there is no adapter"):
        await aside
    assert loop.bench.failures == []


@pytest.mark.parametrize("lora", ["", "critic"])
@on_a_loop
async def test_a_token_outside_the_vocabulary_is_its_loops_error_and_no_engine_sees_it(
    lora: str,
) -> None:
    loop = Loop(vocab_size=50)
    session = loop.open()
    tokens = [*PROMPT.tolist(), *await loop.turn(session, PROMPT.tolist())]

    with pytest.raises(RequestRefused, match=r"token 50 at index 8 is outside .* of 50"):
        async with asyncio.timeout(5.0):
            await loop.sessions.generate(session, np.asarray([*tokens, 50]), 5, lora)

    assert await loop.turn(session, [*tokens, 49]) == [16, 17, 18, 19, 20]
    assert len(loop.inbox.requests) == 2
    assert loop.bench.failures == []
