"""`python -m MODULE` as a fork of a process that has imported torch and umbra, to save the seconds
that this takes.

`python preloaded_python.py COMMAND` imports them and becomes COMMAND in the same process, for a
torchrun that a shell or a terminal controls: its ranks are forks.

A fork has the command line and the environment of its own in /proc, where umbra looks at processes,
and the signal handlers, descriptors, arguments and `sys.path` of a new interpreter
(tests/faults/test_preloaded_python.py compares them). If it is torchrun, its ranks are forks, too.
What differs:

- Modules read their environment variables before the fork, and all forks share one hash seed.
- A process ends without the interpreter's finalization.
- There must be no GPU: CUDA does not survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Final, NoReturn
from unittest.mock import patch

_FORKS: Final = multiprocessing.get_context("forkserver")
_PR_SET_MM: Final = 35
_PR_SET_MM_MAP: Final = 14
_NO_FD: Final = 0xFFFFFFFF
_START_LIMIT_S: Final = 30.0
_shown: Final[list[object]] = []
"""Keeps the memory alive from which /proc reads."""


def start_server() -> None:
    """Starts the server that every `PreloadedProcess` needs; it ends with this process."""
    _FORKS.set_forkserver_preload(["preloaded_modules"])
    paths = (os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent))
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths))):
        forkserver.ensure_running()


class PreloadedProcess:
    """What tests need of `subprocess.Popen`.

    Args:
        command: [sys.executable, *options, "-m", module, *arguments].
        folder: in which it runs.
        environment: all its variables.
        output: file of its stdout and stderr; its stdin is empty.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], output: Path
    ) -> None:
        output.write_bytes(b"")
        started, starting = _FORKS.Pipe(duplex=False)
        arguments = (list(command), folder, dict(environment), output, starting)
        self._process = _FORKS.Process(target=_begin, args=arguments)
        with started:
            with starting:
                self._process.start()
            assert started.poll(_START_LIMIT_S), "the fork did not begin"
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status, -N if signal N ended it; None while it runs."""
        status = self._process.exitcode
        if status is not None:
            self._process.join()  # multiprocessing keeps its descriptors until then
        return status

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for the end and returns the exit status.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        self._process.join(timeout_s)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(["a preloaded python"], timeout_s or 0.0)
        return status

    def kill(self) -> None:
        self._process.kill()


class _ForkedRank(subprocess.Popen[bytes]):
    """`Popen` for torchrun's agent, which only forks where `Popen` would also call `exec`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._environment = environment
        super().__init__(command)

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                _become(list(args), self._environment)
            finally:  # an error must not continue as a second agent
                os._exit(1)
        self._child_created = True


def _fork_rank(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> _ForkedRank:
    """Takes the place of `SubprocessHandler._popen`."""
    assert handler._stdout is None, "not for torchrun's --redirects and --tee"
    return _ForkedRank(args, env)


def _begin(
    command: list[str],
    folder: Path,
    environment: dict[str, str],
    output: Path,
    starting: object,
) -> NoReturn:
    """`starting` is closed once /proc shows the command."""
    os.setsid()
    os.chdir(folder)
    with open(os.devnull, "rb") as nothing, output.open("ab") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    _become(command, environment)


def _become(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Makes a fork what a new process with this command would be."""
    from preloaded_modules import SYSTEM_PATH
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    _shown.append(_show(command, environment))
    gc.freeze()  # objects of the parent would close descriptors that are no longer theirs
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    at = command.index("-m")
    sys.orig_argv, sys.argv = command, command[at:]
    del sys.argv[1]
    added = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [os.getcwd(), *filter(None, added), *SYSTEM_PATH]
    sys.stdout.reconfigure(write_through="-u" in command[:at])  # pyright: ignore
    SubprocessHandler._popen = _fork_rank  # pyright: ignore
    status = _status_of(command[at + 1])
    threading._shutdown()  # pyright: ignore
    atexit._run_exitfuncs()  # pyright: ignore
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(status)


def _status_of(module: str) -> int:
    """Runs it as the main module; returns the exit status."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 -- an interpreter prints them all
        # Not the frame of this function.
        stack = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(error.with_traceback(stack))
        return 1
    return 0


def _show(command: Sequence[str], environment: Mapping[str, str]) -> object:
    """Has /proc show this command line and environment while the returned object lives.

    Source: prctl_set_mm_map in Linux, kernel/sys.c, which needs all places in memory at once.
    """
    variables = [f"{name}={value}" for name, value in environment.items()]
    words, settings = _block_of(command), _block_of(variables)
    block = ctypes.create_string_buffer(words + settings, len(words) + len(settings))
    begin = ctypes.addressof(block)
    between, end = begin + len(words), begin + len(block)
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    code, data, heap = stat[23:25], stat[42:44], stat[44]
    places = [*code, *data, heap, libc.sbrk(ctypes.c_long(0)), stat[25]]
    places += [begin, between, between, end]
    request = struct.pack("=12QII", *map(int, places), 0, 0, _NO_FD)
    size = ctypes.c_ulong(len(request))
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, request, size, ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_MM_MAP)")
    return block


def _block_of(strings: Sequence[str]) -> bytes:
    return b"".join(os.fsencode(string) + b"\0" for string in strings)


if __name__ == "__main__":
    _become(sys.argv[1:], dict(os.environ))
