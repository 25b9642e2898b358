"""The faulty engine, and the deltas that it falsifies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from async_tests import skip_time
from engine_runs import Collector, on_the_engines_loop, run_async, running, wire_request
from hypothesis import given
from hypothesis import strategies as st

from umbra.engines.echo.echo_engine import EchoEngine, EchoTokens
from umbra.engines.faulty.faulty_engine import CALLS, FaultyEngine, first_halves, without_run
from umbra.runtime.engine_api.token_deltas import DeltaBatch, DeltaBuffer, DeltaColumns
from umbra.runtime.errors import ConfigError, EngineError

VOCAB_SIZE = 97
PROMPT = [1, 2, 3]
BURST = 1024
LENGTH = 2 * BURST + 500


def make_faulty(*faults: dict[str, Any], **settings: Any) -> FaultyEngine:
    """Makes BURST tokens of each request at once: a request of LENGTH takes three batches."""
    echo: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "load_weights": True}
    return FaultyEngine(inner="echo", faults=list(faults), **(echo | settings))


def requests(count: int) -> list[dict[str, Any]]:
    return [wire_request(i, PROMPT, max_new_tokens=LENGTH) for i in range(count)]


def whole(request_id: int) -> list[int]:
    whole = EchoTokens(1000 + request_id, PROMPT, vocab_size=VOCAB_SIZE)
    return whole.draw(LENGTH).tokens.tolist()


async def read_all(engine: FaultyEngine, count: int) -> list[DeltaColumns]:
    """Every batch up to the last finish."""
    batches: list[DeltaColumns] = []
    await engine.submit(requests(count))
    num_finished = 0
    async with aclosing(engine.deltas()) as stream:
        while num_finished < count:
            batches.append(await anext(stream))
            num_finished += len(batches[-1]["finished_ids"])
    return batches


def read_with(*faults: dict[str, Any], count: int = 3) -> list[DeltaColumns]:
    batches: list[DeltaColumns] = []

    async def body() -> None:
        engine = make_faulty(*faults)
        async with running(engine):
            batches.extend(await read_all(engine, count))

    run_async(body)
    return batches


def num_tokens(batches: list[DeltaColumns]) -> int:
    return sum(len(batch["tokens"]) for batch in batches)


def starts(batches: list[DeltaColumns], request_id: int) -> list[int]:
    """Where the runs of a request begin, in the order of arrival."""
    return [
        int(position)
        for batch in batches
        for request, position in zip(batch["ids"], batch["positions"], strict=True)
        if request == request_id
    ]


def test_without_faults_all_is_the_inner_engine_s() -> None:
    collector = Collector()

    for batch in read_with():
        collector.apply(batch)

    assert [collector[i].tokens for i in range(3)] == [whole(i) for i in range(3)]


def test_a_dropped_batch_is_gone_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    batches = read_with({"kind": "drop", "after_tokens": 1000})

    assert [starts(batches, i) for i in range(3)] == [[BURST, 2 * BURST]] * 3
    (record,) = caplog.records
    assert record.getMessage() == "injecting a fault: drop (batch) at token 3072 (due at 1000)"
    assert record.levelno == logging.WARNING


def test_a_dropped_run_is_of_one_request() -> None:
    batches = read_with({"kind": "drop", "what": "run", "after_tokens": 1})

    positions = sorted(starts(batches, i) for i in range(3))
    assert positions == [[0, BURST, 2 * BURST]] * 2 + [[BURST, 2 * BURST]]


def test_a_repeated_batch_comes_twice() -> None:
    batches = read_with({"kind": "repeat", "after_tokens": 3 * BURST + 1})

    assert [starts(batches, i) for i in range(3)] == [[0, BURST, BURST, 2 * BURST]] * 3
    assert num_tokens(batches) == 3 * (LENGTH + BURST)


def test_tokens_come_again_from_earlier_offsets() -> None:
    batches = read_with({"kind": "repeat", "what": "earlier", "after_tokens": 1}, count=1)

    _, first, second, *_ = batches
    assert first["positions"].tolist() == second["positions"].tolist() == [0]
    assert first["tokens"].tolist() == whole(0)[: BURST // 2]
    assert second["tokens"].tolist() == whole(0)[:BURST]


def test_several_faults_at_one_point_come_in_the_order_of_the_settings() -> None:
    batches = read_with(
        {"kind": "repeat", "after_tokens": 1},
        {"kind": "drop", "what": "run", "after_tokens": 1},
        count=1,
    )

    assert starts(batches, 0) == [BURST, 2 * BURST], "the run is gone from both"


@on_the_engines_loop
async def test_a_stall_is_of_the_engine_not_of_one_stream() -> None:
    engine = make_faulty({"kind": "stall", "for_s": 20.0, "after_tokens": 1}, tokens_per_s=100.0)
    async with running(engine):
        await engine.submit(requests(2))
        async with aclosing(engine.deltas()) as batches:
            assert len((await anext(batches))["ids"]) == 0
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await anext(batches)
        assert (await engine.stats())["running"] == 0, "the consumer's requests go with it"

        async with aclosing(engine.deltas()) as batches, asyncio.TaskGroup() as tasks:
            greeting = tasks.create_task(anext(batches))
            await asyncio.sleep(0.1)
            assert not greeting.done()
            skip_time(20.0)
            assert len((await greeting)["ids"]) == 0


def test_a_slow_engine_holds_back_every_batch_from_its_point_on() -> None:
    arrivals: list[float] = []

    async def body() -> None:
        engine = make_faulty({"kind": "slow", "for_s": 0.1, "after_tokens": 0})
        clock = asyncio.get_running_loop().time
        async with running(engine):
            await engine.submit(requests(1))
            async with aclosing(engine.deltas()) as batches:
                async for batch in batches:
                    arrivals.append(clock())
                    if len(batch["finished_ids"]):
                        return

    run_async(body)
    assert len(arrivals) == 4, "the greeting and three batches"
    assert min(after - before for before, after in pairwise(arrivals)) > 0.09


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "submit": ([],),
    "abort": (None,),
    "pause": ("abort",),
    "sleep": (1,),
    "wake": (["weights"],),
    "probe_import": ([],),
    "prepare_update": (1, {}, {}),
    "verify_update": ([],),
}


@pytest.mark.parametrize("call", [call for call in CALLS if call != "deltas"])
@on_the_engines_loop
async def test_a_call_that_fails_does_not_reach_the_engine(call: str) -> None:
    engine = make_faulty({"kind": "error", "call": call, "after_tokens": 0})
    method: Callable[..., Any] = getattr(engine, call)
    async with running(engine):
        with pytest.raises(EngineError, match=rf"a fault was injected: error \({call}\)"):
            await method(*ARGUMENTS.get(call, ()))

        assert num_tokens(await read_all(engine, 1)) == LENGTH, "it serves as before"
        assert (await engine.stats())["version"] == 0


@on_the_engines_loop
async def test_a_stream_can_fail_and_begin_again() -> None:
    engine = make_faulty({"kind": "error", "call": "deltas", "after_tokens": 1})
    async with running(engine):
        with pytest.raises(EngineError, match=r"error \(deltas\), due at token 1"):
            await read_all(engine, 1)

        assert num_tokens(await read_all(engine, 1)) == LENGTH


def test_the_inner_engine_is_named_where_it_cannot_be_made() -> None:
    with pytest.raises(ConfigError, match=r"EchoEngine: .*'speed'; it takes .*vocab_size"):
        make_faulty(speed=1)
    with pytest.raises(ConfigError, match="cannot import 'nope'"):
        FaultyEngine(inner="nope:Engine")
    with pytest.raises(ConfigError, match="seed must be a whole number, got 'seven'"):
        make_faulty(seed="seven")


@on_the_engines_loop
async def test_an_engine_with_nothing_but_the_protocol_can_be_wrapped() -> None:
    engine = FaultyEngine(inner=f"{__name__}:BareEngine", vocab_size=VOCAB_SIZE)
    async with engine, asyncio.TaskGroup() as tasks:
        await tasks.create_task(engine.run())
        assert (await engine.stats())["version"] == -1


class BareEngine:
    """Neither entered nor run; the rest is the echo engine's."""

    def __init__(self, **settings: Any) -> None:
        self.stats = EchoEngine(**settings).stats


Run = tuple[int, int, list[int]]  # id, position, tokens


def make_batch(lengths: list[int]) -> DeltaColumns:
    """Run r belongs to request 10 + r, starts at r, and ends it; token and logprob encode r."""
    buffer = DeltaBuffer()
    for run, length in enumerate(lengths):
        tokens = np.arange(length, dtype=np.int32) + 100 * run
        buffer.add_runs(
            ids=np.array([10 + run]),
            positions=np.array([run]),
            counts=np.array([length]),
            tokens=tokens,
            logprobs=-tokens.astype(np.float32),
            version=run,
        )
        buffer.add_finish(10 + run, "length")
    batch = buffer.take()
    assert batch is not None
    return batch


def runs_of(batch: DeltaColumns) -> list[Run]:
    """Its runs, checked as the manager checks them."""
    checked = DeltaBatch.from_wire(batch)
    assert checked.logprobs.tolist() == (-checked.tokens).tolist()
    assert checked.versions.tolist() == (checked.ids - 10).tolist()
    return [
        (
            int(checked.ids[run]),
            int(checked.positions[run]),
            checked.tokens[checked.bounds[run] : checked.bounds[run + 1]].tolist(),
        )
        for run in range(len(checked.ids))
    ]


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(lengths=LENGTHS, data=st.data())
def test_a_lost_run_leaves_the_others_and_all_finishes(
    lengths: list[int], data: st.DataObject
) -> None:
    batch = make_batch(lengths)
    whole = runs_of(batch)
    lost = data.draw(st.integers(0, len(lengths) - 1))

    spoiled = without_run(batch, lost)

    assert runs_of(spoiled) == whole[:lost] + whole[lost + 1 :]
    assert spoiled["finished_ids"].tolist() == batch["finished_ids"].tolist()
    assert spoiled["finish_reasons"] == batch["finish_reasons"]
    assert runs_of(batch) == whole, "the batch itself stays as it is"


@given(lengths=LENGTHS)
def test_first_halves_begin_where_the_runs_do_and_finish_nothing(lengths: list[int]) -> None:
    batch = make_batch(lengths)
    whole = runs_of(batch)

    halves = first_halves(batch)

    assert runs_of(halves) == [
        (request, position, tokens[: (len(tokens) + 1) // 2]) for request, position, tokens in whole
    ]
    assert len(halves["finished_ids"]) == len(halves["finish_reasons"]) == 0
    assert runs_of(batch) == whole, "the batch itself stays as it is"
