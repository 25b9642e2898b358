"""Fixtures of the modules that test an engine with LoRA adapters, for two kinds of model. A module
imports them all and gives what it has otherwise than here."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_factory import save_adapter

MAX_NUM_SEQS = 16
MAX_RANK = 10


@pytest.fixture(scope="session", params=["qwen3", "qwen3-untied"])
def model_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def max_num_seqs() -> int:
    return MAX_NUM_SEQS


@pytest.fixture(scope="session")
def adapts_embeddings() -> bool:
    return True


@pytest.fixture(scope="session")
def adapters(
    model_kind: str, adapts_embeddings: bool, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    some = ("v_proj", "o_proj", "gate_proj")
    found = {
        "all": save_adapter(folder / "all", model_kind, seed=1, rank=4),
        "some": save_adapter(folder / "some", model_kind, seed=2, rank=MAX_RANK, targets=some),
    }
    if adapts_embeddings and model_kind == "qwen3-untied":
        outer = ("embed_tokens", "lm_head", "k_proj")
        found["outer"] = save_adapter(folder / "outer", model_kind, seed=3, targets=outer)
    return found
