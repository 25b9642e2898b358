"""Conformance: new weights, and the versions of what they make."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from conformance_runs import MakeEngine, requests, results_of, weights
from engine_runs import Collector, on_the_engines_loop, running
from local_sync import publish, regions_nbytes

from umbra.runtime.engine_api.lora import LoraSpec
from umbra.runtime.errors import EngineError, IllegalTransition, WeightSyncError


@pytest.mark.slow
@on_the_engines_loop
async def test_nothing_is_served_before_weights_came(
    make_engine: MakeEngine, tmp_path: Path, model_kind: str
) -> None:
    engine = make_engine(load_weights=False)
    async with running(engine):
        assert (await engine.stats())["version"] == -1
        with pytest.raises(EngineError, match="PENDING_WEIGHTS"):
            await engine.submit(requests(1))
        with pytest.raises(IllegalTransition):
            await engine.resume()

        outcome = await publish(engine, weights(model_kind), 7, tmp_path)

        results = await results_of(engine, requests(1))
    assert results[0].versions == [7] * 8
    assert outcome.mismatches == []
    assert outcome.nbytes == regions_nbytes(list(weights(model_kind).values()))


@on_the_engines_loop
async def test_an_update_that_fails_its_checksums_is_never_served(
    make_engine: MakeEngine, tmp_path: Path, model_kind: str
) -> None:
    def tamper(regions: list[list[int | None]]) -> None:
        regions[3][2] = 12345

    engine = make_engine()
    async with running(engine):
        outcome = await publish(engine, weights(model_kind), 1, tmp_path, tamper=tamper)

        assert len(outcome.mismatches) == 1
        with pytest.raises(EngineError, match="PENDING_WEIGHTS"):
            await engine.submit(requests(1))
        await publish(engine, weights(model_kind), 2, tmp_path)
        assert (await results_of(engine, requests(1)))[0].versions == [2] * 8


@pytest.mark.slow
@on_the_engines_loop
async def test_versions_follow_updates_and_frozen_requests_go_on(
    make_engine: MakeEngine, tmp_path: Path, model_kind: str
) -> None:
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


@on_the_engines_loop
async def test_an_adapter_is_refused_by_an_engine_for_whole_models(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    matrices = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{which}.weight": torch.zeros(4, 4)
        for which in "AB"
    }

    refused = pytest.RaisesExc(WeightSyncError, match=r"brings a LoRA adapter, and .* was started")

    engine = make_engine()
    async with running(engine):
        await engine.pause("abort")
        with pytest.RaisesGroup(refused):
            await publish(engine, matrices, 1, tmp_path, lora=LoraSpec(rank=4, alpha=4.0))
        await engine.abort_update()
        await engine.resume()
        assert (await results_of(engine, requests(1)))[0].versions == [0] * 8


@on_the_engines_loop
async def test_the_steps_of_an_update_come_in_order(
    make_engine: MakeEngine, tmp_path: Path, model_kind: str
) -> None:
    engine = make_engine()
    async with running(engine):
        with pytest.raises(WeightSyncError, match="prepare_update comes first"):
            await engine.load()
        with pytest.raises(WeightSyncError, match="load comes first"):
            await engine.commit_update()
        await engine.abort_update()
        await engine.submit(requests(1, max_new_tokens=400))
        with pytest.RaisesGroup(pytest.RaisesExc(IllegalTransition, match="SERVING")):
            await publish(engine, weights(model_kind), 1, tmp_path)
