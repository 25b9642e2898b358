"""The conformance suite for the engines that come with umbra and need nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conformance_runs import VOCAB_SIZE, MakeEngine
from conformance_suite import *  # noqa: F403 - the tests
from engine_runs import Engine

from umbra.engines.echo.echo_engine import EchoEngine
from umbra.engines.embedded.embedded_engine import EmbeddedEngine
from umbra.engines.faulty.faulty_engine import FaultyEngine


@pytest.fixture(params=["echo", "embedded", "faulty"])
def make_engine(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> MakeEngine:
    """Makes an engine that serves version 0 by default, slow enough to interrupt."""

    def make(**settings: Any) -> Engine:
        settings = {"max_context_len": 512, "tick_ms": 2.0, "load_weights": True} | settings
        if request.param == "echo":
            return EchoEngine(
                vocab_size=VOCAB_SIZE, tokens_per_s=2000.0, verify_checksums=True, **settings
            )
        settings |= {"model_path": str(model_folder("qwen3")), "dtype": "float64"}
        if request.param == "faulty":
            return FaultyEngine(inner="embedded", max_num_seqs=16, **settings)
        return EmbeddedEngine(max_num_seqs=16, **settings)

    return make
