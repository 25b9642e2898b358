"""tests/run_on_gpus.py runs all that a GPU is needed for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[2]
SCRIPT = TESTS / "run_on_gpus.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_every_module_with_tests_for_gpus_is_in_a_job() -> None:
    modules = {
        str(path.relative_to(TESTS.parent))
        for path in TESTS.rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text() and path != Path(__file__)
    }
    listed = set(run("--list").stdout.split())

    assert len(modules) > 10
    assert not modules - listed
    assert all((TESTS.parent / name).exists() for name in listed if name.startswith("tests/"))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the second job would succeed")
def test_jobs_of_a_chain_run_one_after_the_other_and_a_failed_one_is_reported(
    tmp_path: Path,
) -> None:
    done = run("--seconds", "90", "--logs", str(tmp_path), "0:versions,weights-vllm")

    first, second = done.stdout.splitlines()
    assert first.startswith("versions: status 0")
    assert second.startswith("weights-vllm: status 2")
    assert "no usable CUDA device" in (tmp_path / "weights-vllm.log").read_text()
    assert done.returncode == 1


def test_what_is_still_to_be_done_when_the_time_is_over_is_named(tmp_path: Path) -> None:
    done = run("--seconds", "1", "--logs", str(tmp_path), "0:versions")

    assert done.stdout == "versions: no time was left\n"
    assert done.returncode == 1


def test_an_unknown_job_is_refused() -> None:
    done = run("0:sglang,speed")

    assert done.returncode == 2
    assert "unknown: speed" in done.stderr
