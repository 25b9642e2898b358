"""The embedded engine whose syncs bring a LoRA adapter, beside transformers with it merged in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from adapter_factory import read_adapter
from conformance_suite import VOCAB_SIZE
from engine_runs import Collector, Engine, on_the_engines_loop, running
from local_sync import publish
from lora_fixtures import *  # noqa: F403 - the fixtures
from lora_fixtures import MAX_RANK
from lora_runs import asked_of_each, check_all

from umbra.engines.embedded.embedded_engine import EmbeddedEngine
from umbra.runtime.engine_api.lora import LoraSpec
from umbra.runtime.errors import ConfigError, WeightSyncError

pytestmark = pytest.mark.process


def make_engine(folder: Path) -> Engine:
    return EmbeddedEngine(
        model_path=str(folder), max_context_len=512, tick_ms=2.0, lora_rank=MAX_RANK
    )


async def publish_adapter(engine: Engine, adapter: Path, version: int, folder: Path) -> None:
    tensors, spec = read_adapter(adapter)
    outcome = await publish(engine, tensors, version, folder, lora=spec)
    assert outcome.mismatches == []


@on_the_engines_loop
async def test_every_request_has_the_adapter_of_the_last_sync(
    model_folder: Callable[[str], Path],
    model_kind: str,
    adapters: dict[str, Path],
    tmp_path: Path,
) -> None:
    engine = make_engine(model_folder(model_kind))
    async with running(engine):
        assert (await engine.stats())["version"] == -1
        for version, name in enumerate([*adapters, "some", "some", "all"], start=1):
            if version > 1:
                await engine.pause("abort")
            await publish_adapter(engine, adapters[name], version, tmp_path)
            await check_all(engine, model_kind, name, adapters)
        await engine.pause("abort")
        await engine.sleep(1)
        await engine.wake(["weights", "kv_cache"])
        await engine.resume()
        await check_all(engine, model_kind, "all", adapters)


@on_the_engines_loop
async def test_a_frozen_request_goes_on_with_the_new_adapter(
    model_folder: Callable[[str], Path],
    model_kind: str,
    adapters: dict[str, Path],
    tmp_path: Path,
) -> None:
    asked = asked_of_each([""], 2, max_new_tokens=300)

    collector = Collector()
    engine = make_engine(model_folder(model_kind))
    async with running(engine):
        await publish_adapter(engine, adapters["all"], 1, tmp_path)
        async with aclosing(engine.deltas()) as batches:
            await engine.submit(asked)
            while len(collector.completions) < len(asked):
                collector.apply(await anext(batches))
            await engine.pause("keep")
            await publish_adapter(engine, adapters["some"], 2, tmp_path)
            while collector.num_finished() < len(asked):
                collector.apply(await anext(batches))
        await check_all(engine, model_kind, "some", adapters)
    for request in asked:
        assert set(collector[request["id"]].versions) == {1, 2}


@on_the_engines_loop
async def test_what_is_no_adapter_of_its_layers_is_refused(
    model_folder: Callable[[str], Path],
    model_kind: str,
    adapters: dict[str, Path],
    tmp_path: Path,
) -> None:
    other = {
        "base_model.model.other.lora_A.weight": torch.zeros(4, 48),
        "base_model.model.other.lora_B.weight": torch.zeros(VOCAB_SIZE, 4),
    }
    refused = pytest.RaisesExc(WeightSyncError, match="no LoRA adapter to 1 of the layers")

    engine = make_engine(model_folder(model_kind))
    async with running(engine):
        await publish_adapter(engine, adapters["all"], 1, tmp_path)
        await engine.pause("abort")
        with pytest.RaisesGroup(refused):
            await publish(engine, other, 2, tmp_path, lora=LoraSpec(rank=4, alpha=4.0))
        await engine.abort_update()
        await engine.resume()
        await check_all(engine, model_kind, "all", adapters)


def test_an_engine_has_its_own_weights_or_those_of_a_sync(
    model_folder: Callable[[str], Path],
) -> None:
    with pytest.raises(ConfigError, match="lora_rank = 4 and load_weights exclude each other"):
        EmbeddedEngine(
            model_path=str(model_folder("qwen3")),
            max_context_len=64,
            load_weights=True,
            lora_rank=4,
        )
