"""What a run left on the machine: processes it started, however indirectly, and socket folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from umbra.runtime.environment import socket_root
from umbra.trainer.drill.watching import DrillError, wait_for

MARK_VARIABLE: Final = "UMBRA_DRILL"
"""Environment variable that every process of a run inherits, with a value of its own."""

_GRACE_S: Final = 5.0


def find_leftovers(mark: str, torchrun_pid: int) -> list[str]:
    """One line for each process and folder that is still there when all should be gone."""
    try:
        wait_for(
            "all to end", lambda: True if not _leftovers(mark, torchrun_pid) else None, _GRACE_S
        )
    except DrillError:
        return _leftovers(mark, torchrun_pid)
    return []


def _leftovers(mark: str, torchrun_pid: int) -> list[str]:
    folders = socket_root().glob(f"*-{torchrun_pid}-*")
    return [*_marked_processes(mark), *(f"socket folder {folder}" for folder in folders)]


def _marked_processes(mark: str) -> Iterator[str]:
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                yield f"process {entry.name}: {command}"
        except OSError:
            continue  # It ended meanwhile, or is somebody else's.
