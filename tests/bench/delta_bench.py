"""How a rollout manager fares with the deltas of many engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench_programs import BenchError

_TIMEOUT_S: Final = 300.0
_NUM_ENGINES: Final = 64
_NUM_PROCESSES: Final = 2  # that the engines share
_TOKENS_PER_S: Final = 50  # of a trajectory: 2 or 3 at each tick of 50 ms


def run(
    num_trajectories: int,
    duration_s: float,
    *,
    completion_len: int = 512,
    has_ledger: bool = False,
) -> dict[str, float]:
    """One manager with `num_trajectories` in flight over 64 simulated engines.

    Args:
        completion_len: tokens of a trajectory, after a prompt of 128.
        has_ledger: whether it records every trajectory, in a folder of the machine's /tmp.

    Returns:
        At full speed, engines making batches as fast as they are taken: `tokens_per_s` by the
        clock, `tokens_per_cpu_s` by the processor time of the manager's process, `requests_per_s`
        and `requests_per_cpu_s` of the trajectories that ended and were replaced, and
        `cpu_us_per_run`, of a run of 2 or 3 tokens. At a tick of 50 ms, which is
        `paced_tokens_per_s`: `delta_p50_ms` and `delta_p99_ms` from the making of a batch to its
        having been applied, `paced_cpu_share` of one core, and `bytes_per_trajectory`, by which the
        manager's resident memory has grown, with `tokens_per_trajectory` in flight.

    The manager is confined to one core, the engines to the others, where there are several.
    """
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as folder:
        share = _NUM_ENGINES // _NUM_PROCESSES
        engines = [
            ["delta_engines", folder, str(first), str(share)]
            for first in range(0, _NUM_ENGINES, share)
        ]
        with started(engines, cores[1:] or cores) as processes:
            for process in processes:
                assert process.stdout is not None
                process.stdout.readline()
            sizes = [str(_NUM_ENGINES), str(num_trajectories), str(duration_s)]
            ledger = f"{folder}/ledger/bench" if has_ledger else ""
            program = ["delta_manager", folder, *sizes, str(completion_len), ledger]
            with started([program], cores[:1]) as (manager,):
                output, _ = manager.communicate(timeout=_TIMEOUT_S)
    if manager.returncode != 0:
        raise BenchError(f"the manager's process ended with status {manager.returncode}")
    facts: dict[str, float] = json.loads(output)
    return facts


def num_trajectories_for(tokens_per_s: int) -> int:
    """How many must be in flight for each engine to make so many tokens at a tick."""
    return _NUM_ENGINES * tokens_per_s // _TOKENS_PER_S


@contextmanager
def started(
    programs: Sequence[Sequence[str]], cores: Sequence[int]
) -> Generator[list[subprocess.Popen[bytes]]]:
    """The programs' processes, on these cores; they are gone afterwards."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for name, *arguments in programs:
            program = str(Path(__file__).with_name(f"{name}.py"))
            argv = [sys.executable, program, *arguments, str(os.getpid())]
            process = subprocess.Popen(argv, stdout=subprocess.PIPE)
            processes.append(process)
            os.sched_setaffinity(process.pid, cores)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
