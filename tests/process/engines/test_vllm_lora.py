"""vLLM on the CPU with LoRA adapters, beside transformers with their matrices merged in."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from adapter_fixtures import *  # noqa: F403 - the fixtures
from conformance_suite import MakeEngine
from engine_runs import Collector, on_the_engines_loop, running, wire_request
from local_sync import publish
from lora_fixtures import *  # noqa: F403 - the fixtures
from lora_fixtures import MAX_NUM_SEQS
from lora_runs import asked_of_each, check_each
from model_factory import make_model
from vllm_runs import needs_vllm, running_core

from umbra.engines.vllm.vllm_engine import VllmCore
from umbra.runtime.errors import EngineError

pytestmark = [
    needs_vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.filterwarnings("default"),  # vLLM's own
]


@pytest.fixture(scope="session")
def adapts_embeddings() -> bool:
    return False


@pytest.fixture(scope="module")
def core(
    model_kind: str, model_folder: Callable[[str], Path], adapters: dict[str, Path]
) -> Generator[VllmCore]:
    with running_core(model_folder(model_kind), adapters, max_num_seqs=MAX_NUM_SEQS) as core:
        yield core


@on_the_engines_loop
async def test_requests_of_several_adapters_get_the_logprobs_of_their_own(
    make_engine: MakeEngine, model_kind: str, adapters: dict[str, Path]
) -> None:
    engine = make_engine()
    async with running(engine):
        await check_each(engine, model_kind, 0, adapters)


@pytest.mark.parametrize("sleep_level", [None, 1, 2])
@on_the_engines_loop
async def test_an_update_gives_new_weights_beneath_the_same_adapters(
    make_engine: MakeEngine,
    model_kind: str,
    adapters: dict[str, Path],
    tmp_path: Path,
    sleep_level: Any,
) -> None:
    engine = make_engine()
    async with running(engine):
        await check_each(engine, model_kind, 0, adapters)
        for version in (1, 2):
            await engine.pause("abort")
            if sleep_level is not None:
                await engine.sleep(sleep_level)
                await engine.wake(["weights", "kv_cache"])
            weights = dict(make_model(model_kind, version).named_parameters())
            await publish(engine, weights, version, tmp_path)
            await check_each(engine, model_kind, version, adapters)


@on_the_engines_loop
async def test_a_frozen_request_goes_on_with_its_adapter_over_the_new_weights(
    make_engine: MakeEngine, model_kind: str, adapters: dict[str, Path], tmp_path: Path
) -> None:
    asked = asked_of_each(["", *adapters], 1, max_new_tokens=300)

    engine = make_engine()
    async with running(engine):
        collector = Collector()
        async with aclosing(engine.deltas()) as batches:
            await engine.submit(asked)
            while len(collector.completions) < len(asked):  # the others would be aborted
                collector.apply(await anext(batches))
            await engine.pause("keep")
            weights = dict(make_model(model_kind, 1).named_parameters())
            await publish(engine, weights, 1, tmp_path)
            while collector.num_finished() < len(asked):
                collector.apply(await anext(batches))

        assert all(found.reason == "length" for found in collector.completions.values())
        assert all(1 in found.versions for found in collector.completions.values())
        await check_each(engine, model_kind, 1, adapters)


@on_the_engines_loop
async def test_an_unknown_adapter_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with running(engine):
        with pytest.raises(ValueError, match="no LoRA adapter 'other'; known: all, some"):
            await engine.submit([wire_request(0, [1], lora="other")])


@on_the_engines_loop
async def test_an_update_fails_where_an_adapter_has_gone(
    make_engine: MakeEngine, model_kind: str, adapters: dict[str, Path], tmp_path: Path
) -> None:
    engine = make_engine()
    weights = dict(make_model(model_kind, 1).named_parameters())
    async with running(engine):
        away = adapters["all"].rename(tmp_path / "away")
        try:
            await engine.pause("abort")
            with pytest.RaisesGroup(pytest.RaisesExc(EngineError, match="LoRA adapter 'all'")):
                await publish(engine, weights, 1, tmp_path)
        finally:
            away.rename(adapters["all"])
        await publish(engine, weights, 2, tmp_path)
        await check_each(engine, model_kind, 1, adapters)
