"""Keeps SGLang's habits from the process that it is started in.

It takes over the logging, makes files for its sockets in the folder for temporary ones, and has its
children send SIGQUIT, on which it would kill this process; here it ends the engine alone.
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
# For killed processes to be gone, with their memory on the GPU.


def ignore_sigquit(signum: int, frame: object) -> None:
    """SGLang's `custom_sigquit_handler`, until it is up: a start that fails is told otherwise."""


@contextlib.contextmanager
def keeping_logging() -> Generator[None]:
    """The root logger's level and handlers afterwards are those from before."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


@contextlib.contextmanager
def temporary_files_in(folder: Path | None) -> Generator[None]:
    """Of this process, not of those it starts: their compilers' caches serve later runs."""
    before = tempfile.tempdir
    tempfile.tempdir = before if folder is None else str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def socket_files(port_args: Any) -> list[Path]:
    """Files that SGLang made for its sockets and leaves behind."""
    fields = cast("dict[str, object]", vars(port_args))
    names = [value for value in fields.values() if isinstance(value, str)]
    return [Path(name.removeprefix("ipc://")) for name in names if name.startswith("ipc://")]


def remove_load_snapshot(frontend: Any) -> None:
    """The name in /dev/shm of what its scheduler has open and writes, which nothing here reads and
    SGLang never removes."""
    path: str | None = getattr(getattr(frontend, "load_snapshot_reader", None), "path", None)
    if path is not None:
        Path(path).unlink(missing_ok=True)


def end_children(pids: Collection[int]) -> None:
    """SIGKILL children of this process and all below them; blocks until they are gone."""
    for pid in pids:
        descendants.kill_tree(pid)
    for pid in pids:
        descendants.wait_for_exits([pid], _EXIT_LIMIT_S)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def let_stacks_be_shown() -> None:
    """In a scheduler: SIGUSR1 has it write where its threads are to its standard error."""
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def show_stacks(pids: Collection[int]) -> None:
    """Of schedulers that have let it."""
    for pid in pids:
        descendants.send_signal(pid, signal.SIGUSR1)


def restore_sigquit(handler: Any) -> None:
    """`handler` as `signal.getsignal` gave it."""
    signal.signal(signal.SIGQUIT, signal.SIG_DFL if handler is None else handler)
