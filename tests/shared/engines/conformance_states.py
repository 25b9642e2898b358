"""Conformance: engines that pause, resume, sleep and wake."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from conformance_runs import MakeEngine, requests, results_of, weights
from engine_runs import Collector, collect, on_the_engines_loop, running, wire_request
from local_sync import publish

from umbra.runtime.errors import EngineError, IllegalTransition


@on_the_engines_loop
async def test_pause_abort_ends_everything_and_resume_goes_on(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with running(engine):
        await engine.submit(requests(4, max_new_tokens=400))

        await engine.pause("abort")

        collector = Collector()
        await collect(engine, collector, 4)
        assert {c.reason for c in collector.completions.values()} == {"abort"}
        with pytest.raises(EngineError, match="PAUSED"):
            await engine.submit(requests(1))
        await engine.resume()
        assert (await results_of(engine, requests(1)))[0].reason == "length"


@pytest.mark.slow
@on_the_engines_loop
async def test_pause_keep_freezes_and_goes_on_without_a_gap(make_engine: MakeEngine) -> None:
    # Long enough that they still run when this process was held up for a moment.
    asked = requests(4, max_new_tokens=300)

    engine = make_engine()
    async with running(engine):
        whole = await results_of(engine, asked)
        collector = Collector()
        async with aclosing(engine.deltas()) as batches:
            await engine.submit(asked)
            while not collector[3].tokens:
                collector.apply(await anext(batches))

            await engine.pause("keep")

            frozen = await engine.stats()
            await asyncio.sleep(0.02)
            later = await engine.stats()
            assert later | {"resident_nbytes": 0} == frozen | {"resident_nbytes": 0}
            assert frozen["running"] > 0
            await engine.resume()
            while collector.num_finished() < 4:
                collector.apply(await anext(batches))

    for i in range(4):
        assert collector[i].tokens == whole[i].tokens


@on_the_engines_loop
async def test_pause_drain_finishes_first_and_admits_nobody(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with running(engine), asyncio.TaskGroup() as tasks:
        await engine.submit(requests(4, max_new_tokens=60))
        drained = tasks.create_task(engine.pause("drain"))
        await asyncio.sleep(0)  # the drain has been asked for
        with pytest.raises(EngineError, match="draining"):
            await engine.submit([wire_request(9, [1])])
        await drained
        stats = await engine.stats()
        collector = Collector()
        await collect(engine, collector, 4)

    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert [collector[i].reason for i in range(4)] == ["length"] * 4


@on_the_engines_loop
async def test_a_drain_ends_when_what_it_waits_for_is_aborted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with running(engine), asyncio.TaskGroup() as tasks:
        await engine.submit(requests(4, max_new_tokens=400))
        tasks.create_task(engine.pause("drain"))
        await engine.pause("abort")
        assert (await engine.stats())["running"] == 0


@pytest.mark.parametrize("level", [1, 2])
@on_the_engines_loop
async def test_sleep_and_wake_keep_or_lose_the_version(
    make_engine: MakeEngine,
    tmp_path: Path,
    level: Any,
    frees_memory_asleep: bool,
    model_kind: str,
) -> None:
    engine = make_engine()
    async with running(engine):
        before = await results_of(engine, requests(3))
        await engine.pause("abort")

        await engine.sleep(level)

        with pytest.raises(IllegalTransition, match="resume"):
            await engine.resume()
        asleep = await engine.stats()
        assert asleep["kv_nbytes"] == 0 or not frees_memory_asleep
        with pytest.raises(EngineError, match="ASLEEP"):
            await engine.submit(requests(1))
        await engine.wake(["weights"])
        if level == 2:
            assert asleep["version"] == -1
            assert asleep["weights_nbytes"] == 0 or not frees_memory_asleep
            await engine.wake(["kv_cache"])
            await publish(engine, weights(model_kind), 3, tmp_path)
        else:
            assert asleep["version"] == 0
            await engine.wake(["kv_cache"])
            await engine.resume()
        after = await results_of(engine, requests(3))

    for i in range(3):
        assert after[i].tokens == before[i].tokens


@on_the_engines_loop
async def test_an_engine_that_is_half_awake_may_sleep_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with running(engine):
        before = await results_of(engine, requests(3))
        await engine.pause("abort")
        for half in ("kv_cache", "weights"):
            await engine.sleep(1)
            await engine.wake([half])  # pyright: ignore[reportArgumentType]
            await engine.sleep(1)
            asleep = await engine.stats()
            assert (asleep["version"], asleep["running"]) == (0, 0)
            await engine.wake(["weights", "kv_cache"])
        await engine.resume()
        after = await results_of(engine, requests(3))

    for i in range(3):
        assert after[i].tokens == before[i].tokens


@on_the_engines_loop
async def test_an_engine_that_waits_for_weights_may_sleep(make_engine: MakeEngine) -> None:
    engine = make_engine(load_weights=False)
    async with running(engine):
        await engine.sleep(2)
        await engine.wake(["kv_cache", "weights"])
        assert (await engine.stats())["version"] == -1
        with pytest.raises(ValueError, match="unknown tags"):
            await engine.wake(["optimizer"])  # pyright: ignore[reportArgumentType]


@on_the_engines_loop
async def test_pause_and_resume_twice_do_no_harm(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with running(engine):
        await engine.resume()
        await engine.pause("keep")
        await engine.pause("abort")
        await engine.resume()
        with pytest.raises(ValueError, match="pause mode"):
            await engine.pause("gently")  # pyright: ignore[reportArgumentType]
        assert (await results_of(engine, requests(1)))[0].reason == "length"
