"""The conformance suite for vLLM, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from conformance_suite import *  # noqa: F403 - the tests
from conformance_suite import MakeEngine, weights
from engine_runs import Engine
from vllm_runs import SharedVllmEngine, needs_vllm, running_core, weight_image

from umbra.engines.vllm.core import VllmCore

pytestmark = [
    needs_vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.filterwarnings("default"),  # vLLM's own
]


@pytest.fixture(scope="module")
def vllm_core(model_folder: Callable[[str], Path]) -> Generator[VllmCore]:
    with running_core(model_folder("qwen3")) as core:
        yield core


@pytest.fixture(scope="module")
def first_image() -> Generator[dict[str, Any]]:
    with weight_image(weights()) as image:
        yield image


@pytest.fixture(scope="session")
def resumes_draws() -> bool:
    return False


@pytest.fixture(scope="session")
def frees_memory_asleep() -> bool:
    return False


@pytest.fixture(params=["vllm"])
def make_engine(
    vllm_core: VllmCore, first_image: dict[str, Any], model_folder: Callable[[str], Path]
) -> MakeEngine:
    def make(*, load_weights: bool = True, **settings: Any) -> Engine:
        settings = {"max_context_len": 512, "tick_ms": 2.0, "device": "cpu"} | settings
        image = first_image if load_weights else None
        return SharedVllmEngine(vllm_core, model_folder("qwen3"), image, **settings)

    return make
