from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from umbra.runtime.disk import explain
from umbra.runtime.errors import ActorError, ConfigError
from umbra.runtime.process import descendants, trampoline
from umbra.runtime.process.host_memory import open_memory_file
from umbra.runtime.process.process_end import ExitStatus, PidWatch

PARENT_PID_VARIABLE = "UMBRA_PARENT_PID"
"""Set for every child: the pid that it passes to `prctl.die_with_parent`."""

_KILL_WAIT_S = 30.0
"""Longest wait for a SIGKILLed process: a large one needs seconds to free its memory, and one that
hangs in a driver would otherwise hold its supervisor forever."""

_living_pids: set[int] = set()
# Global, like pids: a process that is neither in this set nor a descendant of one in it is an
# orphan. `spawn` adds in the call that forks; the exit callback removes.

_TAIL_NBYTES = 64 * 1024
"""Bytes read for a tail. More would block the loop on a slow disk; far less could miss the
beginning of a long traceback."""

_ERROR_NBYTES = 1 << 20
"""Bytes read to find the first error, from the incarnation's beginning."""
_OR_ELSE: Final = ", or set another run directory"
_PREFIX: Final = re.compile(r"^\([^)]*\) [A-Z]+ .*?\] ?|^\[[^]]*\] |^ *[|+] ")
# The text that loggers and exception groups put before a traceback's lines: "(Worker pid=7) ERROR
# 11-22 [file:3] ", "[TP0] ", "    | ".
_TRACEBACK: Final = "Traceback (most recent call last):"
# SGLang writes it mid-line: "[11-22 01:37:48 TP0] Scheduler hit an exception: Traceback ...".
_ERROR: Final = re.compile(r"([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception|Interrupt)(: .*)?$")
_NUM_BEFORE: Final = 2  # lines of a traceback that go with its error: where, and the code there


class ChildProcess:
    """A child of a supervisor. Leaving it kills the child and everything below it.

        async with ChildProcess.spawn("engine-0#1", argv, log_path=logs / "engine-0.log") as child:
            status = await child.wait()

    Every child dies with this process (parent-death signal) and is the subreaper of its descendants
    (`prctl`), which stay below it while it lives. A process that this one adopts had an ancestor
    that has died, and `orphans` ends it; no environment, name or session is trusted.

    Main thread's loop only: the parent-death signal follows the spawning thread.
    """

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: ChildLog | None) -> None:
        self.name = name
        self.pid = popen.pid
        self.status: ExitStatus | None = None
        self._popen = popen
        self._log = log
        self._ended = asyncio.Event()
        _living_pids.add(popen.pid)
        PidWatch(popen.pid, self._reap)  # closes itself on its call; the loop keeps it until then

    @classmethod
    def spawn(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        stdin_payload: bytes | None = None,
        pass_fds: Sequence[int] = (),
        cwd: Path | None = None,
        binds_itself: bool = False,
    ) -> ChildProcess:
        """Starts `argv` in a session of its own; takes some milliseconds of the loop.

        Output goes to `log_path`, after a header line, or to ours. `stdin_payload` stays in
        memory, off the command line. A program that `binds_itself` calls
        `prctl.die_with_parent` with PARENT_PID_VARIABLE and `prctl.become_subreaper` first,
        which saves the 10 ms of the trampoline. Raises ActorError if it cannot be started,
        ConfigError if the log cannot be written.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(f"{name}: spawn from the main thread, children die with the thread")
        environment = dict(os.environ if env is None else env)
        environment[PARENT_PID_VARIABLE] = str(os.getpid())
        bound = [] if binds_itself else _bind_argv()
        log = None if log_path is None else ChildLog.begin(log_path, f"{name}: {argv[0]}")
        with contextlib.ExitStack() as stack:
            try:
                popen = subprocess.Popen(
                    [*bound, *argv],
                    env=environment,
                    cwd=cwd,
                    stdin=_stdin(stdin_payload, stack),
                    stdout=None if log is None else stack.enter_context(log.open_for_child()),
                    stderr=None if log is None else subprocess.STDOUT,
                    pass_fds=pass_fds,
                    start_new_session=True,
                )
            except OSError as error:
                raise ActorError(f"cannot start {name} ({argv[0]}): {error}") from error
        return cls(name, popen, log)

    async def wait(self) -> ExitStatus:
        """Any number of tasks may wait; cancelling one is harmless."""
        await self._ended.wait()
        assert self.status is not None
        return self.status

    async def terminate(self, grace_s: float) -> ExitStatus:
        """SIGTERM, up to `grace_s` seconds, then SIGKILL for the child and everything below it.
        Ends stopped processes, too. Raises TimeoutError if SIGKILL does not end it within 30 s."""
        if self.status is None and grace_s > 0:
            self.send_signal(signal.SIGTERM)
            self.send_signal(signal.SIGCONT)  # a stopped process would not handle SIGTERM
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    return await self.wait()
        self.kill()
        async with asyncio.timeout(_KILL_WAIT_S):
            return await self.wait()

    def kill(self) -> None:
        if self.status is None:
            descendants.kill_tree(self.pid)

    def has_ended(self) -> bool:
        """Checks the process itself, because it may have ended without being reaped yet."""
        if self.status is not None:
            return True
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return found is not None

    def send_signal(self, number: int) -> None:
        if self.status is None:
            descendants.send_signal(self.pid, number)

    def log_tail(self, max_lines: int = 20) -> str:
        return "" if self._log is None else self._log.tail(max_lines)

    def describe_errors(self) -> str:
        """Text to append to an error: the first error in this incarnation's log, or its path."""
        if self._log is None:
            return ""
        error = self._log.first_error()
        found = (
            f"the first error in {self._log.path}:\n{error}" if error else f"see {self._log.path}"
        )
        return f"\n{found}"

    def describe_end(self, max_lines: int = 20) -> str:
        """The end and the last log lines, such as `engine-0#1 (pid 7) killed by SIGKILL (9)`."""
        text = f"{self.name} (pid {self.pid}) {self.status or 'still runs'}"
        tail = self.log_tail(max_lines)
        return f"{text}\nlast output:\n{tail}" if tail else text

    async def __aenter__(self) -> ChildProcess:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.terminate(grace_s=0)

    def _reap(self) -> None:
        try:
            # Only checks: `poll` would report success for a status that someone else reaped.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            self.status = ExitStatus(self._popen.poll())
        except ChildProcessError:
            self.status = ExitStatus(self._popen.returncode)
            self._popen.poll()
        _living_pids.discard(self.pid)
        self._ended.set()


def living_pids() -> frozenset[int]:
    return frozenset(_living_pids)


def process_nbytes(pid: int) -> int:
    """Resident memory of one process, shared pages included; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _bind_argv() -> list[str]:
    return [sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid())]


def _stdin(payload: bytes | None, stack: contextlib.ExitStack) -> int | BinaryIO:
    if payload is None:
        return subprocess.DEVNULL
    return stack.enter_context(open_memory_file("stdin", payload))


@dataclass(frozen=True, slots=True)
class ChildLog:
    """The stdout and stderr of a child over all its incarnations, this one from `start_offset`."""

    path: Path
    start_offset: int

    @classmethod
    def begin(cls, path: Path, title: str) -> ChildLog:
        header = f"==== {title} ==== {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:
                file.write(header)
                return cls(path, file.tell())
        except OSError as error:
            raise ConfigError(
                f"cannot write log {path}: {explain(error, path, or_else=_OR_ELSE)}"
            ) from error

    def open_for_child(self) -> BinaryIO:
        """A file to pass to the child; appending, so that writers do not overwrite each other."""
        return self.path.open("ab", buffering=0)

    def tail(self, max_lines: int) -> str:
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self.start_offset, end - _TAIL_NBYTES))
                text = file.read(_TAIL_NBYTES).decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-max_lines:])

    def first_error(self) -> str:
        """The first traceback's last lines; empty if there is none. If several processes write,
        the first error caused the others, and by the end of all their tracebacks it is far
        above the tail."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start_offset)
                text = file.read(_ERROR_NBYTES).decode(errors="replace")
        except OSError:
            return ""
        before: list[str] = []
        in_traceback = False
        for line in (_PREFIX.sub("", raw, count=1) for raw in text.splitlines()):
            in_traceback = in_traceback or _TRACEBACK in line
            if in_traceback and _ERROR.match(line):
                return "\n".join([*before[-_NUM_BEFORE:], line])
            if line.strip(" ^~"):
                before.append(line)
        return ""
