"""Weights from a rank on one GPU to vLLM on another, by CUDA IPC."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import vllm_runs
from adapter_fixtures import *  # noqa: F403 - the fixtures
from conformance_runs import MakeEngine, requests, results_of
from engine_runs import Completion, run_async, running
from gpu_suite import (
    cuda_context,
    test_a_level_2_sleeper_is_updated_from_the_trainer_s_gpu_without_an_image,
    test_versions_in_the_same_memory_generate_as_those_through_the_host,
    test_weights_read_from_the_trainer_s_gpu_generate_as_those_through_the_host,
)
from ipc_pool import EngineInPool, pool_of, rank_processes
from vllm_runs import needs_vllm

from umbra.engines.shell import adapter_engine
from umbra.engines.vllm.vllm_engine import VllmCore
from umbra.runtime.pools.sync_coordinator import SyncCoordinator
from umbra.trainer.world.mesh import usable_gpus

__all__ = [
    "cuda_context",
    "test_a_level_2_sleeper_is_updated_from_the_trainer_s_gpu_without_an_image",
    "test_versions_in_the_same_memory_generate_as_those_through_the_host",
    "test_weights_read_from_the_trainer_s_gpu_generate_as_those_through_the_host",
]
GPUS = usable_gpus()[:2]  # here: the driver keeps descriptors of the question

pytestmark = [
    needs_vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(len(GPUS) < 2, reason="needs two CUDA devices"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
]


@pytest.fixture(scope="session")
def model_kind() -> str:
    return "qwen3-wide"


@pytest.fixture(scope="session")
def rank_variables() -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": GPUS[1]}


@pytest.fixture(scope="module", params=["vllm"])
def core(model_folder: Callable[[str], Path], model_kind: str) -> Generator[VllmCore]:
    """On the first GPU, with parameters in bfloat16, while the rank's are in float32."""
    with vllm_runs.running_core(
        model_folder(model_kind),
        device="cuda",
        dtype="bfloat16",
        kv_cache_num_tokens=1 << 16,
        engine_args={"enforce_eager": True},
    ) as core:
        yield core


@pytest.mark.process
def test_staged_versions_generate_exactly_as_those_read_during_a_pause(
    make_engine: MakeEngine,
    model_kind: str,
    tmp_path: Path,
    rank_variables: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every second version is the same. Syncs have checksums, and requests come one at a time."""
    caplog.set_level(logging.DEBUG, logger=adapter_engine.__name__)

    async def body() -> None:
        engine = make_engine(load_weights=False)
        in_pool = EngineInPool(engine)
        asked = requests(4, max_new_tokens=24, temperature=0.0)
        found: list[list[Completion]] = []

        async def publish_next(coordinator: SyncCoordinator) -> None:
            report = await ranks[0].publish(coordinator, len(found) + 1)
            await coordinator.wait_settled()
            print(report)
            assert report["transport"] == "cuda_ipc"
            assert not report["failed"]
            found.append([(await results_of(engine, [each]))[each["id"]] for each in asked])
            ranks[0].call("negate")

        async with running(engine):
            for is_staged in (False, True):
                settings = {"transport": "cuda_ipc", "staged_updates": is_staged}
                async with pool_of(in_pool, tmp_path, **settings) as coordinator:
                    for _ in range(4):
                        await publish_next(coordinator)

        assert any("copies were staged" in text for text in caplog.messages)
        for paused, staged in zip(found[:4], found[4:], strict=True):
            for expected, completion in zip(paused, staged, strict=True):
                assert completion.tokens == expected.tokens
                assert completion.logprobs == expected.logprobs
        assert found[4][0].logprobs != found[5][0].logprobs

    with rank_processes(tmp_path, env=rank_variables) as ranks:
        ranks[0].call("make", model_kind, 1, None)
        run_async(body)
