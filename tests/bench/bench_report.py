"""What benchmark scripts share: options, progress, medians, torchrun, and a description."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final

_BEGAN: Final = "UMBRA_BENCH_BEGAN"
# time.monotonic() of the first line of progress. Child processes inherit the variable.
_NVIDIA_SMI: Final = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


class BenchError(RuntimeError):
    """A system under test did not run; the message has its last output."""


def options_parser(docstring: str | None) -> argparse.ArgumentParser:
    """A parser with `--rounds`; its description is the docstring's first line."""
    parser = argparse.ArgumentParser(description=(docstring or "").partition("\n")[0])
    parser.add_argument("--rounds", type=positive, default=5, help="for medians (default 5)")
    return parser


def positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return number


def progress(text: str) -> None:
    """Prints a line with the seconds since the benchmark's first line to standard error."""
    now = time.monotonic()
    began = float(os.environ.setdefault(_BEGAN, str(now)))
    print(f"{now - began:6.1f} s: {text}", file=sys.stderr, flush=True)


def median_of(rows: Sequence[Mapping[str, Any]], digits: int = 4) -> dict[str, Any]:
    """The median of each number over the rounds; the most frequent of each text."""
    medians: dict[str, Any] = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        is_text = isinstance(values[0], str)
        median = statistics.mode if is_text else statistics.median
        medians[key] = median(values) if is_text else round(median(values), digits)
    return medians


def describe(*packages: str) -> dict[str, Any]:
    """Hardware, command, commit, and the versions of Python and of installed packages.

    The hardware is processor, cores that this process may use, memory in bytes, load while
    starting, kernel, and all GPUs of the machine, without a context on any of them.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = {"python": platform.python_version()}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "hardware": {
            "cpu": names[0] if names else platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "load_average_1min": round(os.getloadavg()[0], 2),
            "kernel": platform.release(),
            "gpus": _output(*_NVIDIA_SMI).splitlines(),
        },
        "versions": versions,
        "command": shlex.join(["python", *sys.argv]),
        "commit": _output("git", "-C", str(Path(__file__).parent), "describe", "--always"),
    }


def _output(*command: str) -> str:
    """Empty if there is no such program, or it fails."""
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def torchrun(*arguments: str, num_ranks: int = 1) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # Otherwise each rank looks up the machine's name, which takes 10 s where no answer comes.
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(num_ranks)]
    return [*command, *arguments]
