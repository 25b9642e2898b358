"""vLLM on a GPU: the conformance suite, and what every engine keeps there."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch
from adapter_fixtures import *  # noqa: F403 - the fixtures
from conformance_suite import *  # noqa: F403 - the tests
from conformance_suite import MakeEngine, requests, results_of
from engine_runs import run_async, running
from gpu_suite import *  # noqa: F403 - the tests
from gpu_suite import Reference
from ipc_pool import EngineInPool, pool_of, rank_processes
from model_factory import make_model
from vllm_runs import needs_vllm, running_core

from umbra.engines.vllm.core import VllmCore

pytestmark = [
    needs_vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
]

KV_CACHE_NUM_TOKENS = 1 << 22
"""2 GiB: what sleep frees is then far above what else changes on the device."""


@pytest.fixture(scope="module", params=["vllm"])
def core(model_folder: Callable[[str], Path]) -> Generator[VllmCore]:
    with running_core(
        model_folder("qwen3"),
        device="cuda",
        kv_cache_num_tokens=KV_CACHE_NUM_TOKENS,
        max_num_seqs=256,
        engine_args={"enforce_eager": True},
    ) as core:
        yield core


@pytest.fixture(scope="session")
def reference() -> Reference:
    # float32, with attention in TF32
    return Reference(make=lambda seed: make_model("qwen3", seed), atol=1e-2)


@pytest.mark.process
def test_weights_read_from_the_trainer_s_gpu_generate_as_those_through_the_host(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    async def body() -> None:
        engine = make_engine(load_weights=False)
        in_pool = EngineInPool(engine)
        async with running(engine):
            outputs: list[list[list[int]]] = []
            for transport in ("memfd", "cuda_ipc"):
                async with pool_of(in_pool, tmp_path, transport=transport) as coordinator:
                    for seed in (1, 2):
                        ranks[0].call("make", "model", seed, None)
                        report = await ranks[0].publish(coordinator, len(outputs) + 1)
                        await coordinator.wait_settled()
                        print(f"seed {seed}: {report}")
                        assert report["transport"] == transport
                        assert not report["failed"]
                        found = await results_of(engine, requests(8, temperature=0.0))
                        outputs.append([found[i].tokens for i in range(8)])

        assert outputs[0] != outputs[1]
        assert outputs[2:] == outputs[:2]

    with rank_processes(tmp_path) as ranks:
        run_async(body)


def open_files() -> list[str]:
    return [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]


@pytest.mark.process
def test_a_level_2_sleeper_is_updated_from_the_trainer_s_gpu_without_an_image(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    async def body() -> None:
        engine = make_engine(load_weights=False)
        in_pool = EngineInPool(engine)
        async with (
            running(engine),
            pool_of(in_pool, tmp_path, transport="cuda_ipc") as coordinator,
        ):
            ranks[0].call("make", "model", 1, None)
            await ranks[0].publish(coordinator, 1)
            await coordinator.wait_settled()
            before = await results_of(engine, requests(8, temperature=0.0))
            await in_pool.pause("abort", 10.0)
            await engine.sleep(2)
            await engine.wake(["weights", "kv_cache"])

            report = await ranks[0].publish(coordinator, 2)
            await coordinator.wait_settled()

            print(report)
            assert report["transport"] == "cuda_ipc"
            assert not any("umbra-weights" in file for file in open_files())
            after = await results_of(engine, requests(8, temperature=0.0))
        for i in range(8):
            assert after[i].tokens == before[i].tokens

    with rank_processes(tmp_path) as ranks:
        run_async(body)
