"""The engine protocol: what every engine keeps, the one without a model included.

The tests of `test_conformance` and its like, which import them and give `make_engine`, a fixture
that makes an engine of `VOCAB_SIZE` tokens that serves version 0 unless told otherwise.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import Collector, Engine, collect, run_async, running, wire_request
from local_sync import publish, regions_nbytes
from model_factory import make_model
from torch import Tensor

from umbra.runtime.errors import EngineError, IllegalTransition, WeightSyncError

VOCAB_SIZE = 97
MakeEngine = Callable[..., Engine]


def requests(count: int, **changes: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        wire_request(i, rng.integers(0, VOCAB_SIZE, 5 + i).tolist(), **changes)
        for i in range(count)
    ]


def weights(kind: str, seed: int = 0) -> dict[str, Tensor]:
    model = make_model(kind, seed).double()
    return dict(model.named_parameters(remove_duplicate=True))


async def results_of(engine: Engine, wanted: list[dict[str, Any]]) -> Collector:
    collector = Collector()
    await engine.submit(wanted)
    await collect(engine, collector, len(wanted))
    return collector


async def read_until(engine: Engine, collector: Collector, enough: Callable[[], bool]) -> None:
    async with aclosing(engine.deltas()) as batches:
        async for batch in batches:
            collector.apply(batch)
            if enough():
                return


def test_requests_come_back_whole(make_engine: MakeEngine) -> None:
    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            results = await results_of(engine, requests(10, max_new_tokens=40, position=3))
            stats = await engine.stats()

        for completion in results.completions.values():
            assert completion.reason == "length"
            assert len(completion.tokens) == 40
            assert completion.next_position == 43
            assert set(completion.versions) == {0}
            assert all(0 <= token < VOCAB_SIZE for token in completion.tokens)
            assert all(logprob <= 0 for logprob in completion.logprobs)
        assert (stats["running"], stats["waiting"], stats["tokens_total"]) == (0, 0, 400)

    run_async(body)


def test_the_first_batch_is_empty_and_says_that_the_stream_is_attached(
    make_engine: MakeEngine,
) -> None:
    async def body() -> None:
        engine = make_engine()
        async with running(engine), aclosing(engine.deltas()) as batches:
            batch = await anext(batches)

        assert len(batch["ids"]) == len(batch["finished_ids"]) == 0
        assert batch["offsets"].tolist() == [0]

    run_async(body)


def test_columns_have_the_wire_s_dtypes(make_engine: MakeEngine) -> None:
    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            await engine.submit(requests(3))
            async with aclosing(engine.deltas()) as batches:
                async for batch in batches:
                    columns = {
                        name: column.dtype.name
                        for name, column in batch.items()
                        if isinstance(column, np.ndarray)
                    }
                    assert columns == {
                        "ids": "int64",
                        "positions": "int32",
                        "offsets": "int32",
                        "tokens": "int32",
                        "logprobs": "float32",
                        "versions": "int64",
                        "finished_ids": "int64",
                    }
                    if len(batch["finished_ids"]):
                        break

    run_async(body)


def test_generation_stops_at_a_stop_token_which_is_delivered(make_engine: MakeEngine) -> None:
    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            (free,) = requests(1, max_new_tokens=60)
            whole = (await results_of(engine, [free]))[0].tokens
            stop = whole[30]

            results = await results_of(engine, [free | {"stop_token_ids": [stop, 1 << 20]}])

        assert results[0].reason == "stop"
        assert results[0].tokens == whole[: whole.index(stop) + 1]

    run_async(body)


def test_a_cut_request_goes_on_from_its_tokens_and_position(
    make_engine: MakeEngine, resumes_draws: bool
) -> None:
    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            how = {} if resumes_draws else {"temperature": 0.0}
            (request, *others) = requests(4, max_new_tokens=80, **how)
            whole = (await results_of(engine, [request]))[0].tokens
            part = Collector()
            await engine.submit([request, *others])
            await read_until(engine, part, lambda: len(part[0].tokens) > 20)
            so_far = part[0].tokens
            assert 20 < len(so_far) < 80

            rest = request | {
                "tokens": np.append(request["tokens"], np.array(so_far, np.int32)),
                "position": len(so_far),
                "max_new_tokens": 80 - len(so_far),
            }
            results = await results_of(engine, [rest, *(o | {"seed": 5} for o in others)])

        assert so_far + results[0].tokens == whole

    run_async(body)


def test_abort_delivers_what_was_sampled(make_engine: MakeEngine) -> None:
    async def body() -> None:
        engine = make_engine()
        async with running(engine), aclosing(engine.deltas()) as batches:
            await engine.submit(requests(3, max_new_tokens=400))
            collector = Collector()
            while not collector[2].tokens:
                collector.apply(await anext(batches))

            count = await engine.abort([0, 2, 99])

            while collector.num_finished() < 2:
                collector.apply(await anext(batches))
            assert count == 2
            assert [collector[i].reason for i in range(3)] == ["abort", None, "abort"]
            assert await engine.abort(None) == 1
            assert await engine.abort(None) == 0

    run_async(body)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"top_k": 3}, "top_k"),
        ({"max_new_tokens": 509}, "max_context_len=512"),
        ({"tokens": np.array([1000], np.int32)}, "vocabulary"),
    ],
)
def test_a_bad_request_is_refused_with_the_whole_call(
    make_engine: MakeEngine, change: dict[str, Any], text: str
) -> None:
    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            (good, bad) = requests(2)
            with pytest.raises(ValueError, match=text):
                await engine.submit([good, bad | change])
            stats = await engine.stats()
            await engine.submit([good | {"max_new_tokens": 400}])
            with pytest.raises(ValueError, match=r"already here: \[0\]"):
                await engine.submit([good])

        assert stats["running"] + stats["waiting"] == 0

    run_async(body)


def test_pause_abort_ends_everything_and_resume_goes_on(make_engine: MakeEngine) -> None:
    async def body() -> None:
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

    run_async(body)


def test_pause_keep_freezes_and_goes_on_without_a_gap(make_engine: MakeEngine) -> None:
    # Long enough that they still run when this process was held up for a moment.
    asked = requests(4, max_new_tokens=300)

    async def body() -> None:
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

    run_async(body)


def test_pause_drain_finishes_first_and_admits_nobody(make_engine: MakeEngine) -> None:
    async def body() -> None:
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

    run_async(body)


def test_a_drain_ends_when_what_it_waits_for_is_aborted(make_engine: MakeEngine) -> None:
    async def body() -> None:
        engine = make_engine()
        async with running(engine), asyncio.TaskGroup() as tasks:
            await engine.submit(requests(4, max_new_tokens=400))
            tasks.create_task(engine.pause("drain"))
            await engine.pause("abort")
            assert (await engine.stats())["running"] == 0

    run_async(body)


def test_a_consumer_that_goes_takes_its_requests_along(make_engine: MakeEngine) -> None:
    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            await engine.submit(requests(4, max_new_tokens=400))
            collector = Collector()
            await read_until(engine, collector, lambda: bool(collector[0].tokens))

            stats = await engine.stats()
            results = await results_of(engine, requests(4, max_new_tokens=30, seed=5))

        assert (stats["running"], stats["waiting"]) == (0, 0)
        assert all(len(results[i].tokens) == 30 for i in range(4)), "nothing of the old ones"

    run_async(body)


def test_a_new_consumer_replaces_the_old(make_engine: MakeEngine) -> None:
    async def body() -> None:
        engine = make_engine()
        async with (
            running(engine),
            aclosing(engine.deltas()) as old,
            aclosing(engine.deltas()) as new,
        ):
            await anext(old)
            await engine.submit(requests(2, max_new_tokens=400))
            await anext(new)

            with pytest.raises(StopAsyncIteration):
                await anext(old)

            assert (await engine.stats())["running"] == 0
            await engine.submit(requests(1, max_new_tokens=5))
            collector = Collector()
            while collector.num_finished() < 1:
                collector.apply(await anext(new))
        assert collector.completions.keys() == {0}

    run_async(body)


@pytest.mark.slow
def test_nothing_is_served_before_weights_came(
    make_engine: MakeEngine, tmp_path: Path, model_kind: str
) -> None:
    async def body() -> None:
        engine = make_engine(load_weights=False)
        async with running(engine):
            assert (await engine.stats())["version"] == -1
            with pytest.raises(EngineError, match="PENDING_WEIGHTS"):
                await engine.submit(requests(1))
            with pytest.raises(IllegalTransition):
                await engine.resume()

            attested = await publish(engine, weights(model_kind), 7, tmp_path)

            results = await results_of(engine, requests(1))
        assert results[0].versions == [7] * 8
        assert attested["mismatches"] == []
        assert attested["nbytes"] == regions_nbytes(list(weights(model_kind).values()))

    run_async(body)


def test_an_update_that_fails_its_checksums_is_never_served(
    make_engine: MakeEngine, tmp_path: Path, model_kind: str
) -> None:
    def tamper(regions: list[list[int | None]]) -> None:
        regions[3][2] = 12345

    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            attested = await publish(engine, weights(model_kind), 1, tmp_path, tamper=tamper)

            assert len(attested["mismatches"]) == 1
            with pytest.raises(EngineError, match="PENDING_WEIGHTS"):
                await engine.submit(requests(1))
            await publish(engine, weights(model_kind), 2, tmp_path)
            assert (await results_of(engine, requests(1)))[0].versions == [2] * 8

    run_async(body)


@pytest.mark.slow
def test_versions_follow_updates_and_frozen_requests_go_on(
    make_engine: MakeEngine, tmp_path: Path, model_kind: str
) -> None:
    async def body() -> None:
        engine = make_engine()
        collector = Collector()
        async with running(engine), aclosing(engine.deltas()) as batches:
            await engine.submit(requests(2, max_new_tokens=100))
            while not collector[1].tokens:
                collector.apply(await anext(batches))
            await engine.pause("keep")
            await publish(engine, weights(model_kind, seed=1), 1, tmp_path)
            while collector.num_finished() < 2:
                collector.apply(await anext(batches))

        for completion in collector.completions.values():
            assert len(completion.tokens) == 100
            assert completion.versions == sorted(completion.versions)
            assert set(completion.versions) == {0, 1}

    run_async(body)


def test_the_steps_of_an_update_come_in_order(make_engine: MakeEngine) -> None:
    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            with pytest.raises(WeightSyncError, match="begin_update comes first"):
                await engine.load()
            with pytest.raises(WeightSyncError, match="begin_update comes first"):
                await engine.commit_update()
            await engine.abort_update()
            await engine.submit(requests(1, max_new_tokens=400))
            with pytest.raises(IllegalTransition, match="SERVING"):
                await engine.begin_update(1, {}, {})

    run_async(body)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_keep_or_lose_the_version(
    make_engine: MakeEngine,
    tmp_path: Path,
    level: Any,
    frees_memory_asleep: bool,
    model_kind: str,
) -> None:
    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            before = await results_of(engine, requests(3))
            await engine.pause("abort")

            await engine.sleep(level)

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

    run_async(body)


def test_an_engine_that_is_half_awake_may_sleep_again(make_engine: MakeEngine) -> None:
    async def body() -> None:
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

    run_async(body)


def test_an_engine_that_waits_for_weights_may_sleep(make_engine: MakeEngine) -> None:
    async def body() -> None:
        engine = make_engine(load_weights=False)
        async with running(engine):
            await engine.sleep(2)
            await engine.wake(["kv_cache", "weights"])
            assert (await engine.stats())["version"] == -1
            with pytest.raises(ValueError, match="unknown wake tags"):
                await engine.wake(["optimizer"])  # pyright: ignore[reportArgumentType]

    run_async(body)


def test_pause_and_resume_twice_do_no_harm(make_engine: MakeEngine) -> None:
    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            await engine.resume()
            await engine.pause("keep")
            await engine.pause("abort")
            await engine.resume()
            with pytest.raises(ValueError, match="pause mode"):
                await engine.pause("gently")  # pyright: ignore[reportArgumentType]
            assert (await results_of(engine, requests(1)))[0].reason == "length"

    run_async(body)


def test_the_loop_stays_free_while_the_engine_works(make_engine: MakeEngine) -> None:
    async def body() -> None:
        engine = make_engine()
        loop, gaps = asyncio.get_running_loop(), list[float]()
        async with running(engine), asyncio.TaskGroup() as tasks:
            await engine.submit(requests(16, max_new_tokens=400))
            done = tasks.create_task(collect(engine, Collector(), 16))
            while not done.done():
                before = loop.time()
                await asyncio.sleep(0.001)
                gaps.append(loop.time() - before)
        assert np.median(gaps) < 0.05

    run_async(body)


def test_torch_is_single_threaded_here() -> None:
    assert torch.get_num_threads() == 1
