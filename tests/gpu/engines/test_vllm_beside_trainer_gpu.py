"""Weights from a rank on one GPU to vLLM on another, by CUDA IPC."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import vllm_runs
from adapter_fixtures import *  # noqa: F403 - the fixtures
from gpu_suite import (
    cuda_context,
    test_a_level_2_sleeper_is_updated_from_the_trainer_s_gpu_without_an_image,
    test_versions_in_the_same_memory_generate_as_those_through_the_host,
    test_weights_read_from_the_trainer_s_gpu_generate_as_those_through_the_host,
)
from vllm_runs import needs_vllm

from umbra.engines.vllm.vllm_core import VllmCore
from umbra.trainer.world import usable_gpus

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
