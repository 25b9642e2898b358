from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from async_tests import on_a_loop
from recorded_world import Engine, Life, finish_all
from rollout_configs import rollout_config

from umbra.runtime.errors import UmbraError
from umbra.runtime.rollout.dispatch.router import EngineId
from umbra.runtime.rollout.ledger.ledger_events import Restored
from umbra.runtime.rollout.manager import batch_answers
from umbra.runtime.rollout.manager.batch_rendezvous import BatchRendezvous, SyncRequests
from umbra.runtime.rollout.manager.rank_rendezvous import CollectiveCall, RankRendezvous
from umbra.runtime.waiting import Alarm

STEP_3 = CollectiveCall("next_batch", 3, 1.0)
STEP_4 = CollectiveCall("next_batch", 4, 1.0)


async def call(ranks: RankRendezvous, rank: int, wanted: CollectiveCall) -> dict[str, Any]:
    slot = ranks.arrive(rank, wanted)
    return await ranks.wait(rank, slot)


async def failure_of(ranks: RankRendezvous, rank: int, wanted: CollectiveCall) -> str:
    with pytest.raises(UmbraError) as caught:
        await call(ranks, rank, wanted)
    return str(caught.value)


@on_a_loop
async def test_each_rank_gets_its_own_answer_once_all_are_here() -> None:
    ranks = RankRendezvous(2, timeout_s=5)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(call(ranks, 1, STEP_3))
        await asyncio.sleep(0)
        assert not ranks.is_full
        second = tasks.create_task(call(ranks, 0, STEP_3))
        await asyncio.sleep(0)
        assert ranks.is_full
        ranks.give(STEP_3, [{"for": 0}, {"for": 1}])
    assert (first.result(), second.result()) == ({"for": 1}, {"for": 0})
    assert not ranks.is_full


@on_a_loop
async def test_missing_ranks_are_named() -> None:
    ranks = RankRendezvous(4, timeout_s=0.02)
    async with asyncio.TaskGroup() as tasks:
        failures = [tasks.create_task(failure_of(ranks, rank, STEP_3)) for rank in (0, 2)]
    for failure in failures:
        assert "rank 1, 3 did not call next_batch for step 4 within 0.02 s" in failure.result()


@on_a_loop
async def test_ranks_that_disagree_fail_together() -> None:
    ranks = RankRendezvous(2, timeout_s=5)
    async with asyncio.TaskGroup() as tasks:
        early = tasks.create_task(failure_of(ranks, 0, STEP_3))
        await asyncio.sleep(0)
        late = tasks.create_task(failure_of(ranks, 1, STEP_4))
    text = "rank 1 called next_batch for step 5 while rank 0 called next_batch for step 4"
    assert text in early.result()
    assert text in late.result()


@on_a_loop
async def test_a_rank_that_goes_away_leaves_the_call() -> None:
    ranks = RankRendezvous(2, timeout_s=5)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(call(ranks, 0, STEP_3))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        again = tasks.create_task(call(ranks, 0, STEP_4))
        other = tasks.create_task(call(ranks, 1, STEP_4))
        await asyncio.sleep(0)
        ranks.give(STEP_4, [{}, {}])
    assert again.result() == other.result() == {}


@on_a_loop
async def test_a_rank_that_calls_again_replaces_its_earlier_call() -> None:
    ranks = RankRendezvous(1, timeout_s=5)
    async with asyncio.TaskGroup() as tasks:
        stale = tasks.create_task(failure_of(ranks, 0, STEP_3))
        await asyncio.sleep(0)
        fresh = tasks.create_task(call(ranks, 0, STEP_3))
        await asyncio.sleep(0)
        ranks.give(STEP_3, [{"for": 0}])
    assert "again" in stale.result()
    assert fresh.result() == {"for": 0}


def test_a_batch_is_planned_once_however_often_ranks_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_plans, plan_batch = 0, batch_answers.plan_batch

    def counted(*arguments: Any, **settings: Any) -> Any:
        nonlocal num_plans
        num_plans += 1
        return plan_batch(*arguments, **settings)

    monkeypatch.setattr(batch_answers, "plan_batch", counted)

    async def main() -> None:
        config = rollout_config(stop_token_ids=(0,), world_size=2)
        life, engine = Life(tmp_path, config), Engine(EngineId("a", 1), 1)
        async with life.recorder:
            await life.recover(Restored(0, 0), "")
            life.learn(1, 0)
            life.dispatcher.attach(engine.engine_id, engine)
            life.dispatcher.set_serving(engine.engine_id, True)
            life.flow.advance(0)
            await finish_all(life, engine)
            assert life.flow.take(0) is not None
            unused: Any = None
            batches = BatchRendezvous(
                config, unused, unused, life.runner, life.flow, unused, life.recorder
            )
            call = CollectiveCall("next_batch", 0, 1.0, version=1)

            answers = [await batches.join(rank, call) for rank in (0, 1, 1, 0)]

            assert num_plans == 1
            assert answers[0]["sample_ids"] == answers[3]["sample_ids"]
            assert answers[1]["sample_ids"] == answers[2]["sample_ids"]
            assert answers[0]["sample_ids"] != answers[1]["sample_ids"]

    asyncio.run(main())


@on_a_loop
async def test_an_unknown_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        RankRendezvous(2, timeout_s=5).arrive(2, STEP_3)


@on_a_loop
async def test_an_alarm_goes_off_only_after_an_unbroken_wait() -> None:
    fired = asyncio.Event()
    alarm = Alarm(0.03, fired.set)
    alarm.watch(True)
    alarm.watch(False)
    await asyncio.sleep(0.06)
    assert not fired.is_set()

    alarm.watch(True)
    async with asyncio.timeout(5):
        await fired.wait()


def test_an_engine_without_weights_is_asked_for_once_until_its_state_changes() -> None:
    requests = SyncRequests()
    first, second = EngineId("a", 2), EngineId("b", 1)

    assert requests.take_new([first]) == [first]
    assert requests.take_new([first]) == []
    assert requests.take_new([first, second]) == [second]

    requests.observe([second])  # the first one is being updated
    requests.observe([first, second])  # that failed
    assert requests.take_new([first, second]) == [first]


def test_a_new_incarnation_of_an_engine_is_reported_again() -> None:
    requests = SyncRequests()
    requests.take_new([EngineId("a", 1)])

    assert requests.take_new([EngineId("a", 2)]) == [EngineId("a", 2)]
