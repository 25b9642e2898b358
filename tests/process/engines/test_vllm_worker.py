"""The part of the adapter that runs in vLLM's worker processes, without an engine around it."""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from vllm_runs import needs_vllm

pytestmark = [
    needs_vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.filterwarnings("default"),  # vLLM's own
]


def worker(model: nn.Module, **runner: Any) -> Any:
    extension = importlib.import_module("umbra.engines.vllm.vllm_worker").UmbraWorkerExtension()
    extension.model_runner = SimpleNamespace(get_model=lambda: model, **runner)
    extension.vllm_config = importlib.import_module("vllm.config").VllmConfig()
    return extension


def test_a_worker_whose_model_cannot_be_updated_reports_that() -> None:
    """vLLM would leave the other workers' reports to the next order if one raised."""
    report = worker(nn.Identity()).umbra_update({"action": "probe", "allocations": []})

    assert report == {
        "error": "EngineError: the engine's model, Identity, has no parameters: no weights can be "
        "loaded into it"
    }


def test_a_worker_whose_adapters_are_not_reset_reports_that() -> None:
    def has_loaded(order: object) -> dict[str, list[str]]:
        return {"unread": []}

    def reset_lora_state() -> None:
        raise RuntimeError("no slot")

    extension = worker(nn.Linear(2, 2), reset_lora_state=reset_lora_state)
    extension._updates = SimpleNamespace(obey=has_loaded)

    assert extension.umbra_update({"action": "load"}) == {"error": "RuntimeError: no slot"}
