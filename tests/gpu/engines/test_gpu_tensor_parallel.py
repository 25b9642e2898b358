"""vLLM and SGLang over two GPUs: each worker has its slices, whichever way the weights come."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import sglang_runs
import torch
import vllm_runs
from adapter_fixtures import *  # noqa: F403 - the fixtures
from gpu_suite import (
    Reference,
    cuda_context,
    rank_variables,
    test_a_level_2_sleeper_is_updated_from_the_trainer_s_gpu_without_an_image,
    test_an_update_brings_logprobs_of_the_new_weights,
    test_logprobs_are_those_of_transformers,
    test_sleep_gives_device_memory_back,
    test_weights_read_from_the_trainer_s_gpu_generate_as_those_through_the_host,
)
from model_factory import make_model
from sglang_runs import needs_sglang
from transformers import PreTrainedModel
from vllm_runs import needs_vllm

from umbra.engines.sglang.sglang_engine import SglangCore
from umbra.engines.vllm.vllm_engine import VllmCore

__all__ = [
    "cuda_context",
    "rank_variables",
    "test_a_level_2_sleeper_is_updated_from_the_trainer_s_gpu_without_an_image",
    "test_an_update_brings_logprobs_of_the_new_weights",
    "test_logprobs_are_those_of_transformers",
    "test_sleep_gives_device_memory_back",
    "test_weights_read_from_the_trainer_s_gpu_generate_as_those_through_the_host",
]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.filterwarnings("default"),  # the engines' own
]

KV_CACHE_NUM_TOKENS = 1 << 21
"""4 GiB: what sleep frees is then far above what else changes on the device."""


@pytest.fixture(scope="session")
def model_kind() -> str:
    return "qwen3-wide"


@pytest.fixture(
    scope="module",
    params=[pytest.param("vllm", marks=needs_vllm), pytest.param("sglang", marks=needs_sglang)],
)
def core(
    request: pytest.FixtureRequest, model_folder: Callable[[str], Path], model_kind: str
) -> Generator[SglangCore | VllmCore]:
    folder = model_folder(model_kind)
    if request.param == "sglang":
        engine_args = sglang_runs.ENGINE_ARGS | {"tp_size": 2}
        with sglang_runs.running_core(
            folder, kv_cache_num_tokens=KV_CACHE_NUM_TOKENS, engine_args=engine_args
        ) as core:
            yield core
    else:
        with vllm_runs.running_core(
            folder,
            device="cuda",
            dtype="bfloat16",
            kv_cache_num_tokens=KV_CACHE_NUM_TOKENS,
            max_num_seqs=256,
            engine_args={"enforce_eager": True, "tensor_parallel_size": 2},
        ) as core:
            yield core


@pytest.fixture(scope="session")
def reference(model_kind: str) -> Reference:
    def make(seed: int) -> PreTrainedModel:
        return make_model(model_kind, seed).bfloat16().float()

    return Reference(make=make, atol=0.15)
