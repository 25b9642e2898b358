"""Finds what a run leaves on the machine: processes, socket folders, names of shared memory.

with RunTraces() as traces:
    subprocess.run(command, env={**os.environ, **traces.environment})
    print(traces.find(within_s=5.0))
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from umbra.runtime.testing.leak_check import may_belong_to, shared_memory_names

_MARK_VARIABLE: Final = "UMBRA_TRACED_RUN"
_POLL_S: Final = 0.02
"""Interval of reading /proc and folders, whose changes cannot be awaited."""


class RunTraces:
    """Distinguishes what belongs to one run from everything else on the machine.

    A context manager. Processes inherit a variable with a value of this run, however indirectly
    they were started. Sockets go to a root of the run. Shared memory belongs to the run if its name
    is new since this object was made, and no process outside the run uses it.

    Leaving the block kills the run's processes, and removes its socket root.

    Args:
        socket_root: the caller's, which the caller removes; None for a new folder.

    Attributes:
        environment: variables for the processes of the run.
    """

    def __init__(self, socket_root: Path | None = None) -> None:
        # Not below $TMPDIR: a socket's path may have 100 bytes.
        self._socket_root = socket_root or Path(tempfile.mkdtemp(prefix="umbra-run-", dir="/tmp"))
        self._owns_root = socket_root is None
        self._mark = secrets.token_hex(8)
        self._shared_memory_before = shared_memory_names()
        self.environment = {
            _MARK_VARIABLE: self._mark,
            "UMBRA_SOCKET_ROOT": str(self._socket_root),
        }

    def find(self, within_s: float) -> list[str]:
        """One line for each trace that is left.

        Waits up to `within_s` seconds for traces to disappear.
        """
        deadline = time.monotonic() + within_s
        while left := list(self._look()):
            if time.monotonic() > deadline:
                return left
            time.sleep(_POLL_S)
        return []

    def pids(self) -> list[int]:
        """The run's living processes, without this one."""
        wanted = f"{_MARK_VARIABLE}={self._mark}"
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if pid != os.getpid() and wanted in environment_of(pid)]

    def close(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._owns_root:
            shutil.rmtree(self._socket_root, ignore_errors=True)

    def _look(self) -> Iterator[str]:
        pids = self.pids()
        yield from (f"process {pid}: {' '.join(command_of(pid))}" for pid in pids)
        yield from (f"socket folder {path}" for path in self._socket_root.iterdir())
        for name in sorted(shared_memory_names() - self._shared_memory_before):
            if may_belong_to(name, pids):
                yield f"shared memory /dev/shm/{name}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def environment_of(pid: int) -> list[str]:
    """The variables that a process was started with; empty if it has ended."""
    return _strings_of(pid, "environ")


def command_of(pid: int) -> list[str]:
    """A process's command line; empty if it has ended."""
    return _strings_of(pid, "cmdline")


def _strings_of(pid: int, name: str) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return []  # the process has ended, or belongs to another user
    return text.decode(errors="replace").rstrip("\0").split("\0")
