"""The fixtures that give a model directory and an engine that serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
from umbra.runtime.testing.factories import EngineFactory

pytestmark = pytest.mark.process


def test_the_model_directory_is_complete_and_cached(umbra_tiny_model_dir: Path) -> None:
    names = {path.name for path in umbra_tiny_model_dir.iterdir()}

    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


@pytest.mark.slow
def test_an_embedded_engine_generates(umbra_embedded_engine: EngineFactory) -> None:
    engine = umbra_embedded_engine()
    deltas = engine.stream("deltas", timeout_s=60.0)
    request: dict[str, Any] = {
        "id": 7,
        "tokens": np.array([5, 6, 7], np.int32),
        "position": 0,
        "seed": 1,
        "max_new_tokens": 6,
        "temperature": 1.0,
        "stop_token_ids": [],
    }

    engine.call("submit", [request])
    tokens: list[int] = []
    reasons: list[str] = []
    for delta in deltas:
        tokens += delta["tokens"].tolist()
        reasons += delta["finish_reasons"]
        if reasons:
            break
    deltas.close()

    assert len(tokens) == 6
    assert reasons == ["length"]
