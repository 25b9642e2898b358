"""The adapter of docs/write-an-engine.md passes the conformance suite; the page shows its code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from conformance_runs import MakeEngine, requests, results_of
from conformance_suite import *  # noqa: F403 - the tests
from engine_runs import Engine, on_the_engines_loop, running
from local_sync import publish
from model_factory import make_model
from transformers_engine import TransformersEngine

from umbra.engines.shell.adapter_engine import AdapterCore

PAGE = Path(__file__).resolve().parents[3] / "docs/write-an-engine.md"


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


@on_the_engines_loop
async def test_an_update_with_tied_names_gives_the_new_weights_output(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    model = make_model("qwen3", seed=1).double()
    (asked,) = requests(1, max_new_tokens=12, temperature=0.0)

    engine = make_engine(load_weights=False)
    async with running(engine):
        tensors = dict(model.named_parameters(remove_duplicate=False))
        assert tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"]
        await publish(engine, tensors, 1, tmp_path)
        results = await results_of(engine, [asked])

    tokens: list[int] = asked["tokens"].tolist()
    with torch.inference_mode():
        for token in results[0].tokens:
            assert token == int(model(torch.tensor([tokens])).logits[0, -1].argmax())
            tokens.append(token)


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


def test_the_page_names_every_part_of_a_core() -> None:
    core = {name for kind in AdapterCore.__mro__[:-1] for name in kind.__annotations__}
    core |= {name for name in dir(AdapterCore) if not name.startswith("_")}

    named = set(re.findall(r"`(\w+)(?:\(.*?\))?`", PAGE.read_text()))

    assert core - named == set()
