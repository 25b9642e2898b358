"""Fixtures of the modules that test an adapter: one core for all tests, an engine over it for each.

A module imports them all and gives `core`, a module's fixture, and what it has otherwise than here.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from adapter_runs import SharedCore, SharedEngine, weight_image
from conformance_runs import MakeEngine, weights
from engine_runs import Engine

MAX_CONTEXT_LEN = 512


@pytest.fixture(scope="module")
def first_image(model_kind: str) -> Generator[dict[str, Any]]:
    with weight_image(weights(model_kind)) as image:
        yield image


@pytest.fixture(scope="session")
def resumes_draws() -> bool:
    return False


@pytest.fixture(scope="session")
def max_num_seqs() -> int:
    return 256


@pytest.fixture
def make_engine(core: SharedCore, first_image: dict[str, Any], max_num_seqs: int) -> MakeEngine:
    def make(*, load_weights: bool = True, **settings: Any) -> Engine:
        given: dict[str, Any] = {
            "max_context_len": MAX_CONTEXT_LEN,
            "max_num_seqs": max_num_seqs,
            "tick_ms": 2.0,
        }
        return SharedEngine(core, first_image if load_weights else None, **(given | settings))

    return make
