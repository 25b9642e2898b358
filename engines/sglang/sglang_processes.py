"""Confines SGLang's side effects on the process that starts it.

SGLang reconfigures logging, makes socket files in the temporary folder, and has its children send
SIGQUIT on failure, which would kill this process. Here the signal only ends the engine.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import tempfile
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Any, Final, cast

from umbra.runtime.process import descendants

_EXIT_LIMIT_S: Final = 20.0
# Time for killed processes to end and free their GPU memory.


def ignore_sigquit(signum: int, frame: object) -> None:
    """SGLang's `custom_sigquit_handler` during the start: the exception reports a failed start."""


def end_on_sigquit(signum: int, frame: object) -> None:
    print("a process of SGLang has failed", flush=True)
    os._exit(1)


@contextlib.contextmanager
def keeping_logging() -> Generator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


@contextlib.contextmanager
def temporary_files_in(folder: Path | None) -> Generator[None]:
    """Puts this process's temporary files into `folder`, not the children's:
    compiler caches stay."""
    before = tempfile.tempdir
    tempfile.tempdir = before if folder is None else str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def socket_files(port_args: Any) -> list[Path]:
    fields = cast("dict[str, object]", vars(port_args))
    names = [value for value in fields.values() if isinstance(value, str)]
    return [Path(name.removeprefix("ipc://")) for name in names if name.startswith("ipc://")]


def remove_load_snapshot(frontend: Any) -> None:
    """Removes the name in /dev/shm that SGLang's scheduler leaves."""
    path: str | None = getattr(getattr(frontend, "load_snapshot_reader", None), "path", None)
    if path is not None:
        Path(path).unlink(missing_ok=True)


def end_children(pids: Collection[int]) -> None:
    """Sends SIGKILL to children and their descendants; blocks until the children have ended."""
    for pid in pids:
        descendants.kill_tree(pid)
    for pid in pids:
        descendants.wait_for_exits([pid], _EXIT_LIMIT_S)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def allow_stack_dumps() -> None:
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def show_stacks(pids: Collection[int]) -> None:
    for pid in pids:
        descendants.send_signal(pid, signal.SIGUSR1)


def restore_sigquit(handler: Any) -> None:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL if handler is None else handler)
