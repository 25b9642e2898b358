"""The SGLang adapter over a stand-in for SGLang, when syncs bring a LoRA adapter."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from adapter_factory import read_adapter, save_adapter
from adapter_fixtures import *  # noqa: F403 - the fixtures
from conformance_runs import VOCAB_SIZE, MakeEngine, requests, results_of
from engine_runs import Collector, on_the_engines_loop, running
from local_sync import publish
from model_factory import make_model
from sglang_stand_in import LoRAManager, stand_in_core, stand_in_modules

from umbra.engines.sglang.sglang_engine import SglangCore
from umbra.engines.sglang.sglang_settings import SYNCED_ADAPTER
from umbra.runtime.errors import EngineError


@pytest.fixture(scope="module", params=["sglang"])
def core(model_folder: Callable[[str], Path]) -> Generator[SglangCore]:
    with stand_in_modules(lambda: make_model("qwen3").double(), VOCAB_SIZE):
        folder = model_folder("qwen3")
        with stand_in_core(folder, load_weights=False, lora_rank=6) as core:
            yield core


def assert_has(core: SglangCore, folder: Path) -> None:
    """SGLang has that adapter, in a slot."""
    frontend = core._frontend  # pyright: ignore[reportPrivateUsage]
    (manager,) = (
        found
        for found in gc.get_objects()
        if type(found) is LoRAManager and found.base_model is frontend.model
    )
    held, config = manager.loras[SYNCED_ADAPTER]
    tensors, spec = read_adapter(folder)
    assert manager.slots == {SYNCED_ADAPTER}
    assert (config["r"], config["lora_alpha"]) == (spec.rank, spec.alpha)
    assert held.keys() == tensors.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())


@on_the_engines_loop
async def test_each_sync_puts_its_adapter_in_the_place_of_the_last_one(
    make_engine: MakeEngine, core: SglangCore, tmp_path: Path
) -> None:
    folders = [
        save_adapter(tmp_path / "all", seed=1, rank=4),
        save_adapter(tmp_path / "some", seed=2, rank=6, targets=("q_proj", "o_proj")),
    ]

    engine = make_engine(load_weights=False)
    collector = Collector()
    async with running(engine), aclosing(engine.deltas()) as batches:
        for version, folder in enumerate(folders, start=1):
            tensors, spec = read_adapter(folder)
            await publish(engine, tensors, version, tmp_path, lora=spec)
            assert_has(core, folder)
            if version == 1:  # frozen requests do not keep an adapter from being replaced
                await engine.submit(requests(2, max_new_tokens=100))
                while len(collector.completions) < 2:
                    collector.apply(await anext(batches))
                await engine.pause("keep")
        while collector.num_finished() < 2:
            collector.apply(await anext(batches))

    for completion in collector.completions.values():
        assert set(completion.versions) == {1, 2}


@on_the_engines_loop
async def test_requests_name_the_adapter(
    make_engine: MakeEngine, core: SglangCore, tmp_path: Path
) -> None:
    engine = make_engine(load_weights=False)
    async with running(engine), aclosing(engine.deltas()) as batches:
        tensors, spec = read_adapter(save_adapter(tmp_path / "a", seed=1, rank=4))
        await publish(engine, tensors, 1, tmp_path, lora=spec)
        await engine.submit(requests(1, max_new_tokens=100))
        await anext(batches)
        frontend = core._frontend  # pyright: ignore[reportPrivateUsage]
        assert [running.asked.lora_id for running in frontend.rid_to_state.values()] == [
            SYNCED_ADAPTER
        ]


@on_the_engines_loop
async def test_an_adapter_that_sglang_refuses_fails_the_sync_and_not_the_engine(
    make_engine: MakeEngine, core: SglangCore, tmp_path: Path
) -> None:
    good = save_adapter(tmp_path / "good", seed=1, rank=4)
    tensors, spec = read_adapter(good)
    foreign = {name.replace("q_proj", "query"): tensor for name, tensor in tensors.items()}
    foreign = {name: tensor for name, tensor in foreign.items() if "query" in name}

    engine = make_engine(load_weights=False)
    refused = pytest.RaisesExc(EngineError, match="refuses the LoRA adapter: it is incomp")
    async with running(engine):
        with pytest.RaisesGroup(refused):
            await publish(engine, foreign, 1, tmp_path, lora=spec)
        await engine.abort_update()
        await publish(engine, tensors, 2, tmp_path, lora=spec)
        assert_has(core, good)
        assert (await results_of(engine, requests(1)))[0].versions == [2] * 8
