"""vLLM on the CPU whose syncs bring a LoRA adapter, beside transformers with it merged in."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_factory import read_adapter
from adapter_fixtures import *  # noqa: F403 - the fixtures
from conformance_suite import MakeEngine
from engine_runs import Collector, Engine, on_the_engines_loop, running
from local_sync import publish
from lora_fixtures import *  # noqa: F403 - the fixtures
from lora_fixtures import MAX_NUM_SEQS, MAX_RANK
from lora_runs import asked_of_each, check_all
from model_factory import make_model
from torch import Tensor
from vllm_runs import needs_vllm, running_core

from umbra.engines.vllm.vllm_engine import VllmCore
from umbra.runtime.engine_api.lora import LoraSpec
from umbra.runtime.errors import EngineError, WeightSyncError

pytestmark = [
    needs_vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.filterwarnings("default"),  # vLLM's own
]


@pytest.fixture(scope="module")
def core(model_kind: str, model_folder: Callable[[str], Path]) -> Generator[VllmCore]:
    folder = model_folder(model_kind)
    with running_core(
        folder, load_weights=False, lora_rank=MAX_RANK, max_num_seqs=MAX_NUM_SEQS
    ) as core:
        yield core


async def publish_adapter(
    engine: Engine, adapter: Path, version: int, folder: Path, **changes: Any
) -> None:
    tensors, spec = read_adapter(adapter)
    await publish(engine, tensors, version, folder, lora=spec, **changes)


@on_the_engines_loop
async def test_every_request_has_the_adapter_of_the_last_sync(
    make_engine: MakeEngine, model_kind: str, adapters: dict[str, Path], tmp_path: Path
) -> None:
    engine = make_engine(load_weights=False)
    async with running(engine):
        for version, name in enumerate([*adapters, "all"], start=1):
            if version > 1:
                await engine.pause("abort")
            await publish_adapter(engine, adapters[name], version, tmp_path)
            await check_all(engine, model_kind, name, adapters)


@on_the_engines_loop
async def test_a_frozen_request_goes_on_with_the_new_adapter(
    make_engine: MakeEngine, model_kind: str, adapters: dict[str, Path], tmp_path: Path
) -> None:
    asked = asked_of_each([""], 2, max_new_tokens=300)

    engine = make_engine(load_weights=False)
    collector = Collector()
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
        found = collector[request["id"]]
        assert (len(found.tokens), found.reason) == (300, "length")
        assert set(found.versions) == {1, 2}


@on_the_engines_loop
async def test_the_adapter_stays_if_a_sync_ends_before_it_is_loaded(
    make_engine: MakeEngine, model_kind: str, adapters: dict[str, Path], tmp_path: Path
) -> None:
    def end() -> None:
        raise WeightSyncError("it ends here")

    engine = make_engine(load_weights=False)
    async with running(engine):
        await publish_adapter(engine, adapters["all"], 1, tmp_path)
        await engine.pause("abort")
        with pytest.RaisesGroup(pytest.RaisesExc(WeightSyncError, match="it ends here")):
            await publish_adapter(engine, adapters["some"], 2, tmp_path, begun=end)
        await engine.abort_update()
        await engine.resume()

        assert (await engine.stats())["version"] == 1
        await check_all(engine, model_kind, "all", adapters)


@on_the_engines_loop
async def test_an_adapter_with_wrong_checksums_is_never_served(
    make_engine: MakeEngine, model_kind: str, adapters: dict[str, Path], tmp_path: Path
) -> None:
    def tamper(regions: list[list[int | None]]) -> None:
        regions[3][2] = 12345

    engine = make_engine(load_weights=False)
    async with running(engine):
        await publish_adapter(engine, adapters["all"], 1, tmp_path)
        await engine.pause("abort")
        await publish_adapter(engine, adapters["some"], 2, tmp_path, tamper=tamper)

        with pytest.raises(EngineError, match="PENDING_WEIGHTS"):
            await engine.submit(asked_of_each([""], 1))
        await publish_adapter(engine, adapters["all"], 3, tmp_path)
        await check_all(engine, model_kind, "all", adapters)


@on_the_engines_loop
async def test_what_the_model_cannot_have_is_refused_and_the_adapter_stays(
    make_engine: MakeEngine, model_kind: str, adapters: dict[str, Path], tmp_path: Path
) -> None:
    query = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    deeper = {query.format(7, "A"): torch.ones(4, 48), query.format(7, "B"): torch.ones(128, 4)}
    partly = deeper | {name.replace(".7.", ".0."): matrix for name, matrix in deeper.items()}
    narrower = {query.format(0, "A"): torch.ones(4, 47), query.format(0, "B"): torch.ones(128, 4)}
    larger = {query.format(0, "A"): torch.ones(16, 48), query.format(0, "B"): torch.ones(128, 16)}
    model = dict(make_model(model_kind).named_parameters())
    refused: list[tuple[dict[str, Tensor], LoraSpec | None, str]] = [
        (partly, LoraSpec(rank=4, alpha=8.0), r"the model has no model\.layers\.7"),
        (narrower, LoraSpec(rank=4, alpha=8.0), r"in the model and \(128, 47\) in the adapter"),
        (larger, LoraSpec(rank=16, alpha=8.0), r"rank 16, and the engine .* lora_rank = 10"),
        ({name: p.detach() for name, p in model.items()}, None, "brings weights of the model"),
    ]

    engine = make_engine(load_weights=False)
    async with running(engine):
        await publish_adapter(engine, adapters["all"], 1, tmp_path)
        for version, (tensors, spec, words) in enumerate(refused, start=2):
            await engine.pause("abort")
            with pytest.RaisesGroup(pytest.RaisesExc(WeightSyncError, match=words)):
                await publish(engine, tensors, version, tmp_path, lora=spec)
            await engine.abort_update()
            await engine.resume()
        await check_all(engine, model_kind, "all", adapters)

        await engine.pause("abort")  # with no name of the model's, only vLLM itself can tell
        foreign = pytest.RaisesExc(EngineError, match=r"applies no LoRA .* model\.layers\.7")
        with pytest.RaisesGroup(foreign):
            await publish(engine, deeper, 9, tmp_path, lora=LoraSpec(rank=4, alpha=8.0))
