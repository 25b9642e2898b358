"""Helpers for tests of processes: watch pids by pidfd, kill, wait, with deadlines."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Generator, Iterable
from pathlib import Path

from umbra.runtime.process import descendants

DEADLINE_S = 60.0


@contextlib.contextmanager
def all_end(pids: Iterable[int], within_s: float = DEADLINE_S) -> Generator[None]:
    """Watches processes from before what the block does, and asserts that all end after it."""
    pidfds = {pid: os.pidfd_open(pid) for pid in pids}
    try:
        yield
        deadline = time.monotonic() + within_s
        for pid, pidfd in pidfds.items():
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            left_ms = max(0.0, deadline - time.monotonic()) * 1000
            assert poller.poll(left_ms), f"process {pid} still runs: {_command(pid)}"
    finally:
        for pidfd in pidfds.values():
            os.close(pidfd)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


def tree(pid: int) -> list[int]:
    """`pid` and everything below it, whatever its session."""
    return [pid, *(child for child, _ in descendants.living_descendants(pid))]


def processes(run_dir: Path) -> dict[str, dict[str, object]]:
    """The contents of RUN_DIR/processes.json."""
    rows: dict[str, dict[str, object]] = json.loads((run_dir / "processes.json").read_text())
    return rows


def supervisor_of(guardian_pid: int) -> int:
    (supervisor,) = descendants.child_pids(guardian_pid)
    return supervisor


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "?"
