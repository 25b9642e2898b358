"""vLLM's own models in FP8 get from umbra the parameters that they get from a folder.

A worker process makes of the weights what the kernels of an H100 take. No CPU here runs them; an
engine on a GPU is in tests/gpu/engines/test_fp8_gpu.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm_fp8_worker
from fp8_factory import Scheme, save_checkpoint
from vllm_replay_runs import run_scripts
from vllm_runs import needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.process]


@pytest.mark.parametrize(
    ("scheme", "quantization", "left_out"),
    [
        ("blocks", "", ["weight", "weight_scale_inv"]),
        ("tensors", "", ["weight", "weight_scale"]),
        ("none", "fp8", ["weight"]),  # its scale is vLLM's own
    ],
)
def test_fp8_parameters_are_those_of_a_folder(
    tmp_path: Path, scheme: Scheme, quantization: str, left_out: list[str]
) -> None:
    folders = [save_checkpoint(tmp_path / f"seed-{seed}", scheme, seed) for seed in (1, 2)]

    script = vllm_fp8_worker.__file__
    [[report]] = run_scripts([[script, tmp_path / "store", quantization, *folders]])

    print(report)
    assert report["differing"] == [[], [], [], []]
    assert report["unread"] == []
    assert report["num_told_apart"] == report["num_parameters"]
    names = [f"model.layers.0.mlp.down_proj.{name}" for name in left_out]
    assert report["refusal"].endswith(f"{len(names)} of vLLM's parameters: {', '.join(names)}")
