"""vLLM's own models get the same bytes from a recorded plan as from their loaders.

Worker processes build the models as a GPU's worker has them, not prepacked for the CPU. Whole
engines on the CPU are in test_vllm.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_replay_runs import check_plans
from vllm_runs import needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.process]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_plan_fills_vllms_parameters(tmp_path: Path, num_workers: int) -> None:
    check_plans(tmp_path, num_workers)
