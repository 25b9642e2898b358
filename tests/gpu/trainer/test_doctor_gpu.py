"""`umbra doctor` on a machine with GPUs: what it says of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LIMIT_S = 180.0
NUM_GPUS = torch.cuda.device_count()  # asked here, since NVML keeps a descriptor open

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def checked(folder: Path, model: Path, program: list[str], *settings: str) -> tuple[int, str]:
    """The exit status and the output."""
    (folder / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    (folder / "rewards.py").write_text("def score(prompts, completions, **columns): ...\n")
    (folder / "config.toml").write_text(
        f'model.path = "{model}"\ndata.train = "train.jsonl"\n'
        'reward.function = "rewards:score"\ntrain.steps = 1\nrollout.max_new_tokens = 16\n'
    )
    command = [sys.executable, *program, "config.toml", *settings]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ, timeout=LIMIT_S
    )
    return done.returncode, done.stdout + done.stderr


def test_a_node_with_gpus_is_checked_alone(tmp_path: Path, umbra_tiny_model_dir: Path) -> None:
    program = ["-m", "umbra.runtime.cli.umbra_command", "doctor"]

    status, output = checked(tmp_path, umbra_tiny_model_dir, program)

    assert status == 0, output
    assert "another process can read memory of GPU 0" in output
    assert "ok      memory plan    fits" in output
    assert "all is well" in output


def test_the_ranks_add_numbers_over_nccl(tmp_path: Path, umbra_tiny_model_dir: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_GPUS)]

    status, output = checked(
        tmp_path, umbra_tiny_model_dir, [*torchrun, "-m", "umbra.trainer.doctor"]
    )

    assert status == 0, output
    assert f"adds 64 MiB over {NUM_GPUS} ranks" in output
    assert "all is well" in output


def test_memory_in_use_is_reported(tmp_path: Path, umbra_tiny_model_dir: Path) -> None:
    held = torch.empty(4 << 30, dtype=torch.uint8, device="cuda:0")
    program = ["-m", "umbra.runtime.cli.umbra_command", "doctor"]

    status, output = checked(tmp_path, umbra_tiny_model_dir, program)
    del held
    torch.cuda.empty_cache()

    assert status == 1, output
    assert "FAILED  GPUs           GPU 0: " in output
