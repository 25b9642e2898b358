"""SGLang's scheduler sends several tokens of a request at a time while it has many requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing
from pathlib import Path

import pytest
from adapter_fixtures import *  # noqa: F403 - the fixtures
from conformance_runs import VOCAB_SIZE, MakeEngine, requests, results_of, weights
from engine_runs import Collector, Engine, on_the_engines_loop, running
from local_sync import publish
from model_factory import make_model
from sglang_stand_in import Frontend, stand_in_core, stand_in_modules

from umbra.engines.sglang.sglang_engine import SglangCore
from umbra.engines.sglang.sglang_requests import SglangOutput, stream_interval
from umbra.runtime.engine_api.token_deltas import DeltaColumns

COUNT = 128  # requests, of which each sends its tokens 25 at a time
NUM_NEW_TOKENS = 100
NUM_FOR_LONG = 300


@pytest.fixture(scope="module")
def core(model_folder: Callable[[str], Path]) -> Generator[SglangCore]:
    with (
        stand_in_modules(lambda: make_model("qwen3").double(), VOCAB_SIZE),
        stand_in_core(model_folder("qwen3")) as core,
    ):
        yield core


def frontend_of(core: SglangCore) -> Frontend:
    return core._frontend  # pyright: ignore[reportPrivateUsage]


async def begin(
    engine: Engine,
    core: SglangCore,
    collector: Collector,
    batches: AsyncGenerator[DeltaColumns, None],
) -> list[int]:
    """The tokens made of each request after two of its messages, when some have not been sent."""
    await engine.submit(requests(COUNT, max_new_tokens=NUM_FOR_LONG))
    while not all(len(collector[idx].tokens) > 1 for idx in range(COUNT)):
        collector.apply(await anext(batches))
    frontend = frontend_of(core)
    states = list(frontend.rid_to_state.values())
    while not all(state.unsent for state in states):
        await frontend.wait_for_step()
    return [len(state.entries) + len(state.unsent) for state in states]


def test_sglang_sends_tokens_of_few_requests_often_and_those_of_many_seldom() -> None:
    counts = (1, 9, 10, 15, 128, 256, 10_000)
    assert [stream_interval(count) for count in counts] == [2, 2, 2, 3, 25, 50, 50]


@on_the_engines_loop
async def test_sglang_sends_as_many_messages_a_step_for_many_requests_as_for_few(
    make_engine: MakeEngine, core: SglangCore
) -> None:
    """And the tokens are the same."""
    asked = requests(COUNT, max_new_tokens=NUM_NEW_TOKENS)

    before = frontend_of(core).num_messages
    async with running(engine := make_engine()):
        together = await results_of(engine, asked)
    num_messages = frontend_of(core).num_messages - before
    async with running(engine := make_engine()):
        for request in asked[::16]:
            alone = await results_of(engine, [request])
            assert alone[request["id"]] == together[request["id"]]
    per_request = 2 + NUM_NEW_TOKENS / stream_interval(COUNT)  # the first and the last, too
    assert COUNT * 2 < num_messages <= COUNT * per_request
    assert {len(c.tokens) for c in together.completions.values()} == {NUM_NEW_TOKENS}


@on_the_engines_loop
async def test_what_sglang_has_ended_is_delivered_before_the_next_tick(
    make_engine: MakeEngine,
) -> None:
    async with running(engine := make_engine(tick_ms=1e6)):
        results = await results_of(engine, requests(COUNT, max_new_tokens=NUM_NEW_TOKENS))
    assert {len(c.tokens) for c in results.completions.values()} == {NUM_NEW_TOKENS}


@on_the_engines_loop
async def test_a_pause_of_sglang_delivers_the_tokens_that_were_not_yet_sent(
    make_engine: MakeEngine, core: SglangCore
) -> None:
    collector = Collector()
    async with running(engine := make_engine()), aclosing(engine.deltas()) as batches:
        num_made = await begin(engine, core, collector, batches)
        await engine.pause("abort")
        while collector.num_finished() < COUNT:
            collector.apply(await anext(batches))
    assert {c.reason for c in collector.completions.values()} == {"abort"}
    assert all(len(collector[idx].tokens) >= made for idx, made in enumerate(num_made)), (
        "a token was lost"
    )


@on_the_engines_loop
async def test_sglangs_frozen_tokens_that_may_be_older_count_as_made_by_the_older_weights(
    make_engine: MakeEngine, core: SglangCore, tmp_path: Path
) -> None:
    collector = Collector()
    async with running(engine := make_engine()), aclosing(engine.deltas()) as batches:
        num_made = await begin(engine, core, collector, batches)
        await engine.pause("keep")
        await publish(engine, weights("qwen3", 1), 1, tmp_path)
        while collector.num_finished() < COUNT:
            collector.apply(await anext(batches))
    for idx, made in enumerate(num_made):
        versions = collector[idx].versions
        assert versions == sorted(versions)
        # Those made and one on its way at least; at most to the next message.
        assert made < versions.count(0) <= made + stream_interval(COUNT)
        assert len(versions) == NUM_FOR_LONG


@on_the_engines_loop
async def test_sglang_goes_on_with_what_was_frozen_where_no_weights_came(
    make_engine: MakeEngine,
) -> None:
    collector = Collector()
    async with running(engine := make_engine()), aclosing(engine.deltas()) as batches:
        await engine.submit(requests(COUNT, max_new_tokens=NUM_NEW_TOKENS))
        collector.apply(await anext(batches))
        await engine.pause("keep")
        await engine.resume()
        while collector.num_finished() < COUNT:
            collector.apply(await anext(batches))
    lens = {len(c.tokens) for c in collector.completions.values()}
    assert lens == {NUM_NEW_TOKENS}


def test_sglang_leaves_no_name_in_shared_memory(core: SglangCore) -> None:
    assert not Path(frontend_of(core).load_snapshot_reader.path).exists()


def test_an_answer_of_sglang_without_its_first_token_is_made_again() -> None:
    """SGLang 0.5.17's message for a request that it retracts during prefill."""
    output = SglangOutput()
    output.feed({"meta_info": {"output_token_logprobs": [], "completion_tokens": 0}})
    entries = [(-1.0, 7, None), (-1.0, 8, None)]  # of three tokens
    output.feed(
        {
            "meta_info": {
                "output_token_logprobs": entries,
                "completion_tokens": 3,
                "finish_reason": {"type": "length", "length": 3},
            }
        }
    )
    new = output.take()
    assert new is not None
    assert (list(new.tokens), new.finish_reason) == ([], "abort")
