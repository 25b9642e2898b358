"""SGLang on a GPU: the conformance suite, what every engine keeps there, and what is its own."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import aclosing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_fixtures import *  # noqa: F403 - the fixtures
from conformance_runs import MakeEngine, requests, results_of, weights
from conformance_suite import *  # noqa: F403 - the tests
from engine_runs import Collector, on_the_engines_loop, running
from gpu_suite import *  # noqa: F403 - the tests
from gpu_suite import Reference
from local_sync import publish
from model_factory import make_model
from sglang_runs import needs_sglang, running_core
from torch import Tensor
from transformers import PreTrainedModel

from umbra.engines.sglang.sglang_engine import SglangCore
from umbra.engines.sglang.sglang_settings import SglangSettings
from umbra.runtime.engine_api.lifecycle import Tag
from umbra.runtime.errors import EngineError

pytestmark = [
    needs_sglang,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # SGLang's own
]

KV_CACHE_NUM_TOKENS = 1 << 21
"""4 GiB: what sleep frees is then far above what else changes on the device."""


@pytest.fixture(scope="session")
def model_kind() -> str:
    return "qwen3-wide"


@pytest.fixture(scope="module", params=["sglang"])
def core(model_folder: Callable[[str], Path], model_kind: str) -> Generator[SglangCore]:
    folder = model_folder(model_kind)
    with running_core(folder, kv_cache_num_tokens=KV_CACHE_NUM_TOKENS) as core:
        yield core


@pytest.fixture(scope="session")
def reference(model_kind: str) -> Reference:
    def make(seed: int) -> PreTrainedModel:
        return make_model(model_kind, seed).bfloat16().float()

    return Reference(make=make, atol=0.1)


def with_unknown(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"model.layers.1.unknown.weight": torch.ones(3)}


def without_k_proj(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return without(tensors, "model.layers.1.self_attn.k_proj.weight")


def without_norm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return without(tensors, "model.norm.weight")


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {other: tensor for other, tensor in tensors.items() if other != name}


async def failure_of(publishing: Coroutine[Any, Any, object]) -> str:
    """Nothing is kept of the error, whose frames hold on to the weights."""
    try:
        await publishing
    except ExceptionGroup as group:
        return str(group.exceptions[0])
    raise AssertionError("it was taken")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_unknown, "layers.1.unknown"),
        (without_k_proj, "self_attn.qkv_proj"),
        (without_norm, "model.norm.weight"),
    ],
)
@on_the_engines_loop
async def test_weights_that_do_not_fit_are_never_served_and_spoil_no_later_update(
    make_engine: MakeEngine,
    reference: Reference,
    model_kind: str,
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    text: str,
) -> None:
    asked = requests(2, max_new_tokens=12, temperature=0.0)

    engine = make_engine()
    async with running(engine):
        tensors = change(weights(model_kind, 1))
        assert text in await failure_of(publish(engine, tensors, 1, tmp_path))
        with pytest.raises(EngineError, match="PENDING_WEIGHTS"):
            await engine.submit(asked)

        await publish(engine, weights(model_kind, 2), 2, tmp_path)

        results = await results_of(engine, asked)
    for request in asked:
        errors = reference.errors(request, results[request["id"]], 2, 0.0)
        assert errors.max() < reference.atol


@pytest.mark.parametrize("mode", ["abort", "keep"])
@on_the_engines_loop
async def test_a_pause_takes_no_second_while_64_requests_run(
    make_engine: MakeEngine, mode: Any
) -> None:
    engine = make_engine()
    collector = Collector()
    async with running(engine), aclosing(engine.deltas()) as batches:
        await engine.submit(requests(64, max_new_tokens=400))
        while not collector[63].tokens:
            collector.apply(await anext(batches))

        started = time.perf_counter()
        await engine.pause(mode)
        paused = time.perf_counter()
        await engine.resume()
        resumed = time.perf_counter()

    print(
        f"pause {mode}: {(paused - started) * 1e3:.1f} ms, resume {(resumed - paused) * 1e3:.1f} ms"
    )
    assert paused - started < 0.5


def test_sglang_knows_two_of_the_variables_that_bound_the_logits_of_a_prompt() -> None:
    known: Any = import_module("sglang.srt.environ").envs

    found = {name: value for name, value in SglangSettings.environment().items() if "CHUNK" in name}

    assert sorted(value for name, value in found.items() if hasattr(known, name)) == ["1", "1024"]


@on_the_engines_loop
async def test_ids_that_begin_alike_are_not_aborted_together(make_engine: MakeEngine) -> None:
    engine = make_engine()
    collector = Collector()
    async with running(engine), aclosing(engine.deltas()) as batches:
        asked = requests(16, max_new_tokens=100)
        await engine.submit([r | {"id": 1 if i == 0 else 10 + i} for i, r in enumerate(asked)])
        await engine.abort([1])
        while collector.num_finished() < 16:
            collector.apply(await anext(batches))

    reasons = [collector[10 + i].reason for i in range(1, 16)]
    assert collector[1].reason == "abort"
    assert reasons == ["length"] * 15


@on_the_engines_loop
async def test_prompt_plus_budget_may_fill_the_whole_context(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with running(engine):
        (request,) = requests(1)
        budget = 512 - len(request["tokens"])
        results = await results_of(engine, [request | {"max_new_tokens": budget}])
    assert len(results[0].tokens) == budget


@pytest.mark.usefixtures("cuda_context")
@pytest.mark.parametrize("part", ["kv_cache", "weights"])
@on_the_engines_loop
async def test_one_part_alone_gives_its_memory_back(
    make_engine: MakeEngine, model_kind: str, tmp_path: Path, part: Tag
) -> None:
    engine = make_engine()
    async with running(engine):
        asked = requests(8, temperature=0.0)
        before = await results_of(engine, asked)
        stats = await engine.stats()
        free_awake, _ = torch.cuda.mem_get_info()
        await engine.pause("abort")

        await engine.sleep(2, [part])

        freed = torch.cuda.mem_get_info()[0] - free_awake
        size = stats["kv_nbytes"] if part == "kv_cache" else stats["weights_nbytes"]
        assert 0.95 * size <= freed <= 1.05 * size + (64 << 20)
        await publish(engine, weights(model_kind), 1, tmp_path)
        after = await results_of(engine, asked)
    for i in range(8):
        assert after[i].tokens == before[i].tokens
