"""Conformance: requests, their tokens on the way back, and who reads them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import torch
from conformance_runs import VOCAB_SIZE, MakeEngine, read_until, requests, results_of
from engine_runs import Collector, collect, on_the_engines_loop, run_async, running


@on_the_engines_loop
async def test_requests_come_back_whole(make_engine: MakeEngine) -> None:
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


@on_the_engines_loop
async def test_the_first_batch_is_empty_and_confirms_that_the_stream_is_attached(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    async with running(engine), aclosing(engine.deltas()) as batches:
        batch = await anext(batches)

    assert len(batch["ids"]) == len(batch["finished_ids"]) == 0
    assert batch["offsets"].tolist() == [0]


@on_the_engines_loop
async def test_columns_have_the_wire_s_dtypes(make_engine: MakeEngine) -> None:
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


@on_the_engines_loop
async def test_generation_stops_at_a_stop_token_which_is_delivered(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with running(engine):
        (free,) = requests(1, max_new_tokens=60)
        whole = (await results_of(engine, [free]))[0].tokens
        stop = whole[30]

        results = await results_of(engine, [free | {"stop_token_ids": [stop, 1 << 20]}])

    assert results[0].reason == "stop"
    assert results[0].tokens == whole[: whole.index(stop) + 1]


@on_the_engines_loop
async def test_a_request_for_the_most_probable_token_alone_is_greedy_or_refused(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    async with running(engine):
        (greedy,) = requests(1, max_new_tokens=30, temperature=0.0)
        expected = await results_of(engine, [greedy])
        for change in ({"top_k": 1}, {"top_p": 1e-6}):
            truncated = greedy | {"temperature": 1.0} | change
            try:
                found = (await results_of(engine, [truncated]))[0].tokens
            except ValueError as error:
                found = str(error).partition(" samples from the whole distribution")[1]
            assert found in (expected[0].tokens, " samples from the whole distribution")


def test_forced_tokens_have_the_logprobs_that_they_are_sampled_with_or_are_refused(
    make_engine: MakeEngine,
) -> None:
    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            sampled = await results_of(engine, requests(5, max_new_tokens=30, position=3))
            asked = [
                request | {"forced": np.array(sampled[request["id"]].tokens, np.int32)}
                for request in requests(5, max_new_tokens=30, position=3)
            ]
            try:
                forced = await results_of(engine, asked)
            except ValueError as error:
                if "gives no logprobs of forced tokens" not in str(error):
                    raise
                return
            rest = asked[0] | {
                "tokens": np.append(asked[0]["tokens"], asked[0]["forced"][:12]),
                "forced": asked[0]["forced"][12:],
                "position": 15,
                "max_new_tokens": 18,
            }
            cut = await results_of(engine, [rest])

        for number, completion in forced.completions.items():
            assert completion.reason == "length"
            assert completion.tokens == sampled[number].tokens
            assert completion.next_position == 33
            np.testing.assert_allclose(
                completion.logprobs, sampled[number].logprobs, rtol=0, atol=1e-3
            )
        assert cut[0].tokens == forced[0].tokens[12:]
        np.testing.assert_allclose(cut[0].logprobs, forced[0].logprobs[12:], rtol=0, atol=1e-3)

    run_async(body)


@pytest.mark.parametrize(
    "change", [{"temperature": 0.5}, {"top_p": 0.5}, {"stop_token_ids": [1]}, {"max_new_tokens": 9}]
)
@on_the_engines_loop
async def test_forced_tokens_that_could_be_sampled_otherwise_are_refused(
    make_engine: MakeEngine, change: dict[str, Any]
) -> None:
    engine = make_engine()
    async with running(engine):
        (request,) = requests(1, max_new_tokens=3, forced=np.array([1, 2, 3], np.int32))
        with pytest.raises(ValueError, match="request 0: 3 forced tokens need max_new_tokens"):
            await engine.submit([request | change])


@on_the_engines_loop
async def test_a_cut_request_goes_on_from_its_tokens_and_position(
    make_engine: MakeEngine, resumes_draws: bool
) -> None:
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


@on_the_engines_loop
async def test_abort_delivers_what_was_sampled(make_engine: MakeEngine) -> None:
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


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"top_k": -1}, "top_k"),
        ({"max_new_tokens": 509}, "max_context_len=512"),
        ({"tokens": np.array([1000], np.int32)}, "vocabulary"),
    ],
)
@on_the_engines_loop
async def test_a_bad_request_is_refused_with_the_whole_call(
    make_engine: MakeEngine, change: dict[str, Any], text: str
) -> None:
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


@on_the_engines_loop
async def test_a_consumer_that_goes_takes_its_requests_along(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with running(engine):
        await engine.submit(requests(4, max_new_tokens=400))
        collector = Collector()
        await read_until(engine, collector, lambda: bool(collector[0].tokens))

        stats = await engine.stats()
        results = await results_of(engine, requests(4, max_new_tokens=30, seed=5))

    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert all(len(results[i].tokens) == 30 for i in range(4)), "nothing of the old ones"


@on_the_engines_loop
async def test_a_new_consumer_replaces_the_old(make_engine: MakeEngine) -> None:
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


@pytest.mark.slow
@on_the_engines_loop
async def test_the_loop_stays_free_while_the_engine_works(make_engine: MakeEngine) -> None:
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


def test_torch_is_single_threaded_here() -> None:
    assert torch.get_num_threads() == 1
