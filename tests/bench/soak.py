"""Writes a long run as a rollout manager does, kills it, resumes it, and reads it.

The ledger, its snapshots and its index are written by a manager's own code, in a process that is
killed after 100 steps and at the end (`soak_manager.py`). Each time its successor is timed, and so
is each command that reads the run. At the end, the run goes back to its last checkpoint but one.
Times are those on the clock, from the start of the process; memory is the peak of that process,
but for `manager_resident_mb`, which is the median of the last steps. The exit status is 1 if a
target is missed, or if the ledger does not account for every sample. The run directory is removed.

    python tests/bench/soak.py [--steps 20000] [--samples 512] [--tokens 512] [--run-tokens 2]
        [--ledger-gb 8]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from bench_report import describe, positive

_FIRST_STEPS: Final = 100
_CHECKPOINT_STEPS: Final = 50
_TARGETS: Final[Mapping[str, float]] = {
    "manager_back_s": 5.0,
    "resume_s": 10.0,
    "manager_resident_growth": 1.2,
    "ledger_disk_mb": 10_000.0,
    "bytes_per_token": 8.0,
    "ledger_s": 2.0,
    "ledger_mb": 300.0,
    "samples_s": 2.0,
    "samples_mb": 300.0,
    "dash_s": 2.0,
    "dash_mb": 300.0,
    "step_cpu_growth": 1.05,
}
"""At most; the growth is from 100 steps to the end."""

_TIMEOUT_S: Final = 300.0
_FOLDER: Final = Path(__file__).parent
_UMBRA: Final = ("-m", "umbra.runtime.cli.umbra_command")

Facts = dict[str, Any]


class Soak:
    def __init__(self, run_dir: Path, arguments: argparse.Namespace) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / "ledger" / "rollouts"
        self._steps: int = arguments.steps
        self._samples: int = arguments.samples
        self._tokens: int = arguments.tokens
        first_steps = min(_FIRST_STEPS, self._steps // 2)
        self._lengths = [first_steps, self._steps]
        checkpoint_steps = min(_CHECKPOINT_STEPS, first_steps // 2)
        sizes = (self._samples, self._tokens, arguments.run_tokens, checkpoint_steps)
        self._sizes = [str(size) for size in sizes]
        self._ledger_gb = str(arguments.ledger_gb)
        self._checkpoints: list[list[Any]] = []

    def run(self) -> tuple[dict[str, Facts], int]:
        """Facts by length, and how many samples of trained steps the ledger lacks."""
        self._measure([str(_FOLDER / "soak_files.py"), str(self._run_dir), str(self._steps)])
        found: dict[str, Facts] = {}
        self._write(self._lengths[0] // 2)  # so that all that follow are successors
        for length in self._lengths:
            facts = self._write(length)
            facts |= self._recover("manager_back", None)
            facts |= self._sizes_on_disk(length)
            facts |= self._read(length)
            found[f"{length:,} steps"] = facts
        first, last = found.values()
        for name in ("manager_resident", "step_cpu"):
            unit = "mb" if "resident" in name else "ms"
            last[f"{name}_growth"] = last[f"{name}_{unit}"] / first[f"{name}_{unit}"]
        output = self._measure([*_UMBRA, "ledger", str(self._run_dir), "--json"])[2]
        states = json.loads(output)["states"]
        num_missing = self._steps * self._samples - states["trained"] - states["leased"]
        checkpoint = self._checkpoints[-2]
        last["resume_steps_back"] = self._steps - checkpoint[0]
        last |= self._recover("resume", checkpoint)
        return found, num_missing

    def _write(self, length: int) -> Facts:
        """Until the manager has done so many steps, and is killed in the next one."""
        lines: list[Facts] = []
        with self._manager(None, last_step=length) as output:
            began = time.perf_counter()
            for text in output:
                line = json.loads(text)
                if "step" not in line:
                    continue
                lines.append(line)
                if line["checkpoint"]:
                    self._checkpoints.append(line["checkpoint"])
            took_s = time.perf_counter() - began
        if not lines or lines[-1]["step"] != length:
            raise SystemExit(f"soak: the manager ended before step {length}")
        lines = lines[-max(2, self._lengths[0] // 4) :]
        cpu_s = [after["cpu_s"] - before["cpu_s"] for before, after in pairwise(lines)]
        snapshots_s = lines[-1]["snapshots_cpu_s"] - lines[0]["snapshots_cpu_s"]
        return {
            "wrote_s": took_s,
            "step_cpu_ms": statistics.median(cpu_s) * 1e3,
            "snapshots_cpu_ms_per_step": snapshots_s / len(cpu_s) * 1e3,
            "manager_resident_mb": statistics.median(line["resident_mb"] for line in lines),
        }

    def _recover(self, name: str, checkpoint: list[Any] | None) -> Facts:
        began = time.perf_counter()
        with self._manager(checkpoint) as output:
            line = json.loads(next(output))
            took_s = time.perf_counter() - began
        return {
            f"{name}_s": took_s,
            f"{name}_cpu_s": line["cpu_s"],
            f"{name}_mb": line["peak_mb"],
            f"{name}_groups": line["groups"],
        }

    @contextlib.contextmanager
    def _manager(self, checkpoint: list[Any] | None, last_step: int = -1) -> Generator[Any]:
        """The lines that it prints; it is killed on exit."""
        restored = "" if checkpoint is None else json.dumps(checkpoint)
        options = [*self._sizes, str(last_step), self._ledger_gb, restored, str(os.getpid())]
        command = [sys.executable, str(_FOLDER / "soak_manager.py"), str(self._run_dir), *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process.stdout
            finally:
                process.kill()

    def _sizes_on_disk(self, length: int) -> Facts:
        sizes = {path: path.stat().st_size for path in self._folder.iterdir()}
        log_nbytes = sum(size for path, size in sizes.items() if path.suffix == ".log")
        facts = {"ledger_disk_mb": sum(sizes.values()) / 1e6}
        if length == self._lengths[0]:  # nothing was removed
            facts["bytes_per_token"] = log_nbytes / (length * self._samples * self._tokens)
        return facts

    def _read(self, length: int) -> Facts:
        run_dir = str(self._run_dir)
        commands = {
            "ledger": ["ledger", run_dir],
            "samples": ["samples", run_dir, "--step", str(length)],
            "samples_of_step_1": ["samples", run_dir, "--step", "1"],
            "plot": ["plot", run_dir, "-o", f"{run_dir}/plot.png"],
            "top": ["top", run_dir, "--once"],
        }
        facts: Facts = {}
        for name, words in commands.items():
            facts[f"{name}_s"], facts[f"{name}_mb"], _ = self._measure([*_UMBRA, *words])
        return facts | self._dash(length)

    def _dash(self, length: int) -> Facts:
        """The first requests of the page, and the samples of a step."""
        began = time.perf_counter()
        with _serving(self._run_dir) as (pid, address):
            for path in ("state", "metrics?from=0", "events?from=0", f"samples?step={length}"):
                url = f"http://{address}/api/{path}"
                with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
                    json.loads(response.read())  # when the whole answer is there
            took_s = time.perf_counter() - began
            status = Path(f"/proc/{pid}/status").read_text()
        peak_kib = int(status.partition("VmHWM:")[2].split()[0])
        return {"dash_s": took_s, "dash_mb": peak_kib * 1024 / 1e6}

    def _measure(self, words: list[str]) -> tuple[float, float, bytes]:
        """Seconds, peak memory in MB, and output of a Python program that must succeed."""
        began = time.perf_counter()
        process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout as stdout:
            output = stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"soak: {words[1:]} ended with status {process.returncode}")
        return time.perf_counter() - began, usage.ru_maxrss * 1024 / 1e6, output


@contextlib.contextmanager
def _serving(run_dir: Path) -> Generator[tuple[int, str]]:
    """Pid and address of `umbra dash`."""
    command = [sys.executable, *_UMBRA, "dash", str(run_dir), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://(\S+)/", process.stdout.readline())
        assert found is not None
        try:
            yield process.pid, found[1]
        finally:
            process.send_signal(signal.SIGINT)


def missed(facts: Mapping[str, Facts]) -> list[str]:
    return [
        f"{name} after {length}: {row[name]:.2f}, to reach {most:g}"
        for length, row in facts.items()
        for name, most in _TARGETS.items()
        if row.get(name, 0.0) > most
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=positive, default=20_000)
    parser.add_argument("--samples", type=positive, default=512, help="of a step; a multiple of 8")
    parser.add_argument("--tokens", type=positive, default=512, help="of a sample")
    parser.add_argument("--run-tokens", type=positive, default=2, help="of a sample at each tick")
    parser.add_argument("--ledger-gb", type=float, default=8.0, help="rollout.ledger_gb")
    parser.add_argument("--folder", help="of the run directory (default: as TMPDIR says)")
    arguments = parser.parse_args()
    if arguments.samples % 8 or arguments.steps < 8:
        parser.error("--samples must be a multiple of 8, and --steps at least 8")
    # Raises, so that the run directory is removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    described = describe()
    with tempfile.TemporaryDirectory(prefix="umbra-soak-", dir=arguments.folder) as run_dir:
        facts, num_missing = Soak(Path(run_dir), arguments).run()
        free_mb = shutil.disk_usage(run_dir).free / 1e6
    misses = missed(facts)
    if num_missing:
        misses.append(f"{num_missing} samples of trained steps are not in the ledger")
    result = {
        "bench": "soak",
        "rounds": 1,
        **facts,
        "at most": dict(_TARGETS),
        "sizes": f"{arguments.samples} samples of {arguments.tokens} tokens a step, in runs of "
        f"{arguments.run_tokens}, rollout.ledger_gb = {arguments.ledger_gb:g}",
        "disk_free_mb": free_mb,
        "missed": misses,
        **described,
    }
    print(json.dumps(result, indent=2))
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
