"""The adapter of docs/write-an-engine.md passes the conformance suite; the page shows its code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from conformance_runs import MakeEngine
from conformance_suite import *  # noqa: F403 - the tests
from engine_runs import Engine
from transformers_engine import TransformersEngine

PAGE = Path(__file__).resolve().parents[2] / "docs/write-an-engine.md"


@pytest.fixture(scope="session")
def frees_memory_asleep() -> bool:
    return False


@pytest.fixture
def make_engine(model_folder: Callable[[str], Path]) -> MakeEngine:
    def make(**settings: Any) -> Engine:
        given = {
            "model_path": str(model_folder("qwen3")),
            "dtype": "float64",
            "device": "cpu",
            "max_context_len": 512,
            "tick_ms": 2.0,
            "load_weights": True,
        }
        return TransformersEngine(**(given | settings))

    return make


def test_the_page_shows_this_adapter_and_these_tests() -> None:
    folder = Path(__file__).parent
    sources = [
        "\n".join(line.strip() for line in (folder / name).read_text().splitlines())
        for name in ("transformers_engine.py", "test_transformers_engine.py")
    ]

    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)

    assert examples
    for example in examples:
        for part in dedent(example).split("...\n"):
            wanted = "\n".join(line.strip() for line in part.strip().splitlines())
            assert any(wanted in source for source in sources), wanted
