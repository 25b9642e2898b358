"""The part of the adapter that runs in vLLM's worker processes, without an engine around it."""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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


def test_stacked_matrices_of_experts_are_one_pair_for_each_part_of_each_expert() -> None:
    per_expert = importlib.import_module("umbra.engines.vllm.vllm_worker").per_expert
    number, rank, width, inner = 3, 2, 4, 6
    draws = torch.Generator().manual_seed(0)
    shapes = {
        "mlp.experts.base_layer": (2 * inner, width),
        "mlp.experts": (width, inner),
    }
    tensors = {"o_proj.lora_A.weight": torch.ones(2, 2)}
    for module, (rows, columns) in shapes.items():
        tensors[f"{module}.lora_A.weight"] = torch.randn(number * rank, columns, generator=draws)
        tensors[f"{module}.lora_B.weight"] = torch.randn(rows, rank * number, generator=draws)

    found = per_expert(tensors, rank)

    assert len(found) == 1 + number * 3 * 2
    for n in range(number):
        products = {
            part: found[f"mlp.experts.{n}.{part}.lora_B.weight"]
            @ found[f"mlp.experts.{n}.{part}.lora_A.weight"]
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        changes = [
            tensors[f"{module}.lora_B.weight"][:, n::number]
            @ tensors[f"{module}.lora_A.weight"][rank * n : rank * (n + 1)]
            for module in shapes
        ]
        gate_up = torch.cat((products["gate_proj"], products["up_proj"]))
        torch.testing.assert_close([gate_up, products["down_proj"]], changes)


def test_a_worker_whose_adapters_are_not_reset_reports_that() -> None:
    def has_loaded(order: object) -> dict[str, list[str]]:
        return {"unread": []}

    def reset_lora_state() -> None:
        raise RuntimeError("no slot")

    extension = worker(nn.Linear(2, 2), reset_lora_state=reset_lora_state)
    extension._updates = SimpleNamespace(obey=has_loaded)

    assert extension.umbra_update({"action": "load"}) == {"error": "RuntimeError: no slot"}
