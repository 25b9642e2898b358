"""vLLM's own models on a GPU get the same bytes from a recorded plan as from their loaders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm_replay_runs import check_plans
from vllm_runs import needs_vllm

pytestmark = [
    needs_vllm,
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_plan_fills_vllms_parameters_on_a_gpu(tmp_path: Path) -> None:
    check_plans(tmp_path, 1)
