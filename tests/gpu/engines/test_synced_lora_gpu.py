"""vLLM and SGLang on a GPU whose syncs bring a LoRA adapter, in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import sglang_runs
import torch
import vllm_runs
from adapter_factory import read_adapter, save_adapter
from adapter_runs import SharedCore, SharedEngine
from engine_runs import on_the_engines_loop, run_async, running
from ipc_pool import EngineInPool, pool_of, rank_processes
from local_sync import publish
from lora_runs import check_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # the engines' own
]
KIND = "qwen3-wide-512"
"""vLLM 0.26.0 cannot start with adapters for fewer than 256 tokens."""
TOLERANCE = 0.5
"""In bfloat16 single logprobs are off by 0.1; another adapter makes 3 of it."""
SETTINGS: dict[str, Any] = {
    "load_weights": False,
    "lora_rank": 16,
    "max_num_seqs": 16,
    "kv_cache_num_tokens": 1 << 14,
    "dtype": "bfloat16",
    "device": "cuda",
}
SGLANG_ARGS = {
    name: value
    for name, value in sglang_runs.ENGINE_ARGS.items()
    if name != "enable_deterministic_inference"
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    attention = ("q_proj", "v_proj", "o_proj")  # SGLang 0.5.17 takes no q_proj without v_proj
    return {
        "all": save_adapter(folder / "all", KIND, seed=1, rank=8),
        "some": save_adapter(folder / "some", KIND, seed=2, rank=16, targets=attention),
    }


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("vllm", marks=vllm_runs.needs_vllm),
        pytest.param("sglang", marks=sglang_runs.needs_sglang),
    ],
)
def core(
    request: pytest.FixtureRequest, model_folder: Callable[[str], Path]
) -> Generator[SharedCore]:
    folder = model_folder(KIND)
    if request.param == "vllm":
        with vllm_runs.running_core(
            folder, engine_args={"enforce_eager": True}, **SETTINGS
        ) as core:
            yield core
    else:
        with sglang_runs.running_core(folder, engine_args=SGLANG_ARGS, **SETTINGS) as core:
            yield core


@pytest.fixture
def engine(core: SharedCore) -> SharedEngine:
    return SharedEngine(core, None, max_num_seqs=16, max_context_len=512, tick_ms=2.0)


def test_an_adapter_is_read_from_the_trainer_s_gpu(
    engine: SharedEngine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    async def body() -> None:
        async with (
            running(engine),
            pool_of(EngineInPool(engine), tmp_path, transport="cuda_ipc") as coordinator,
        ):
            for version, name in enumerate(["all", "some", "all"], start=1):
                rank.call("make_adapter", str(adapters[name]))
                report = await rank.publish(coordinator, version)
                await coordinator.wait_settled()
                print(report)
                assert report["transport"] == "cuda_ipc"
                assert not report["failed"]
                await check_all(engine, KIND, name, adapters, TOLERANCE)

    with rank_processes(tmp_path) as (rank,):
        run_async(body)


@vllm_runs.needs_vllm
def test_experts_in_vllm_have_the_adapter_of_the_last_sync(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    kind, targets = "qwen3-moe-wide", ("experts", "q_proj")
    adapters = {
        name: save_adapter(tmp_path / name, kind, seed=seed, rank=8, targets=targets)
        for seed, name in enumerate(("one", "other"), start=1)
    }

    async def body(core: SharedCore) -> None:
        engine = SharedEngine(core, None, max_num_seqs=16, max_context_len=512, tick_ms=2.0)
        async with running(engine):
            for version, name in enumerate(["one", "other", "one"], start=1):
                if version > 1:
                    await engine.pause("abort")
                tensors, spec = read_adapter(adapters[name])
                await publish(engine, tensors, version, tmp_path, lora=spec)
                await check_all(engine, kind, name, adapters, TOLERANCE)

    folder = model_folder(kind)
    with vllm_runs.running_core(folder, engine_args={"enforce_eager": True}, **SETTINGS) as core:
        run_async(lambda: body(core))


@on_the_engines_loop
async def test_the_model_and_its_adapter_survive_a_sleep_at_level_1(
    engine: SharedEngine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    async with running(engine):
        for version, name in enumerate(["some", "all"], start=1):
            if version > 1:
                await engine.pause("abort")
            tensors, spec = read_adapter(adapters[name])
            await publish(engine, tensors, version, tmp_path, lora=spec)
            await engine.pause("abort")
            await engine.sleep(1)
            await engine.wake(["weights"])
            await engine.wake(["kv_cache"])
            await engine.resume()
            await check_all(engine, KIND, name, adapters, TOLERANCE)
