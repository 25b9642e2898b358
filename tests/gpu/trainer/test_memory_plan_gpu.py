"""A hybrid run of a Qwen3-0.6B shape with the KV cache that the memory plan gives it."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "training_run.py"
LIMIT_S = 280.0
SETTINGS = {
    "embedded": [],
    "vllm": [],
    "sglang": [
        'pool.engine_args={attention_backend = "triton", sampling_backend = "pytorch", '
        "disable_cuda_graph = true}"
    ],
}
LARGEST = ["pool.max_context_len=296", "train.micro_batches=2"]
"""Prompts, of 35 to 40 tokens, and micro-batches, of eight groups each, as large as planned."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("engine", list(SETTINGS))
def test_memory_is_within_a_tenth_of_the_plan(tmp_path: Path, engine: str) -> None:
    if engine != "embedded" and importlib.util.find_spec(engine) is None:
        pytest.skip(f"needs {engine}")

    output = trained(tmp_path, f"pool.engine={engine}", *LARGEST, *SETTINGS[engine])

    table = output.rpartition("planned and (seen in the last step):")[2]
    cells = re.findall(r"(\d+\.\d) \((\d+\.\d)\)", table)
    assert len(cells) == 3, output  # sync, generation, train
    for expected, seen in cells:
        assert float(seen) == pytest.approx(float(expected), rel=0.1), output


def trained(folder: Path, *settings: str) -> str:
    """The output of a run of four steps."""
    command = [sys.executable, str(SCRIPT), "--steps", "4", "--folder", str(folder), *settings]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as run:
        try:
            output = run.communicate(timeout=LIMIT_S)[0]
        except BaseException:  # the signal that ends pytest, too
            os.killpg(run.pid, signal.SIGKILL)
            raise
    assert run.returncode == 0, output
    return output
