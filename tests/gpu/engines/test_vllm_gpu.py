"""vLLM on a GPU: the conformance suite, and what every engine keeps there."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch
from adapter_fixtures import *  # noqa: F403 - the fixtures
from conformance_suite import *  # noqa: F403 - the tests
from gpu_suite import *  # noqa: F403 - the tests
from gpu_suite import Reference
from model_factory import make_model
from vllm_runs import needs_vllm, running_core

from umbra.engines.vllm.vllm_engine import VllmCore

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
