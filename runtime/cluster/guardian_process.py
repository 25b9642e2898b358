from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from umbra.runtime.cluster.socket_dir import SocketDir
from umbra.runtime.errors import UmbraError
from umbra.runtime.process import guardian
from umbra.runtime.process.child_process import ChildLog
from umbra.runtime.process.host_memory import open_memory_file
from umbra.runtime.process.process_end import STOP_SIGNALS, ExitStatus

_MAX_READY_NBYTES = 64 * 1024

_TAKE_OVER_LIMIT_S = 60.0
"""From the guardian's start to its taking over: 40 ms on an idle machine."""


class GuardianProcess:
    """A node's guardian, which starts the supervisor, from local rank 0's side. Calls block. The
    guardian outlives its starter: closing leaves it running."""

    def __init__(self, popen: subprocess.Popen[bytes], ready_fd: int, log: ChildLog) -> None:
        self.pid = popen.pid
        self._popen = popen
        self._ready_fd = ready_fd
        self._log = log

    def wait_until_taken_over(self) -> None:
        if not _is_readable(self._ready_fd, _TAKE_OVER_LIMIT_S) or not os.read(self._ready_fd, 1):
            self._popen.kill()
            self._popen.wait()
            raise UmbraError(self._explain("was not started by its guardian"))

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """The JSON object that the supervisor wrote to `--ready-fd`; must be called once. Raises
        UmbraError with the log's last lines if it ended, or was not ready in time."""
        deadline = time.monotonic() + timeout_s
        line = b""
        try:
            while not line.endswith(b"\n"):
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not _is_readable(self._ready_fd, left_s):
                    raise UmbraError(self._explain(f"was not ready within {timeout_s:g} s"))
                chunk = os.read(self._ready_fd, _MAX_READY_NBYTES)
                if not chunk:
                    raise UmbraError(self._explain("ended before it was ready"))
                line += chunk
            answer: dict[str, Any] = json.loads(line)
            return answer
        finally:
            os.close(self._ready_fd)
            self._ready_fd = -1

    def wait(self, timeout_s: float) -> ExitStatus | None:
        try:
            return ExitStatus(self._popen.wait(timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def stop(self, timeout_s: float) -> ExitStatus | None:
        """Ends everything after a start that failed, and waits. Asks again after half the time,
        because a first request waits for the ranks."""
        for _ in range(2):
            if self._popen.poll() is None:
                self._popen.terminate()
            if (status := self.wait(timeout_s / 2)) is not None:
                return status
        return None

    def close(self) -> None:
        """Stops tracking the guardian, which continues; reaps it if it has ended."""
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1
        if self._popen.poll() is None:
            # This process no longer reaps it: it ends with its owner, after us.
            self._popen.returncode = 0

    def __enter__(self) -> GuardianProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _explain(self, what: str) -> str:
        tail = self._log.tail(20) or "(nothing)"
        return f"the supervisor {what}; last lines of {self._log.path}:\n{tail}"


def start_guardian(
    supervisor_argv: Sequence[str],
    *,
    config: bytes,
    socket_dir: SocketDir,
    log_path: Path,
    grace_s: float,
    owner_pidfd: int,
    keys_to_remove: str = "",
    env: Mapping[str, str] | None = None,
) -> GuardianProcess:
    """Starts the guardian, which starts `supervisor_argv --ready-fd N --guardian-pid PID`.

    Call it inside `delayed_stops`, which ends when the caller has stored the guardian. A stop
    signal to the guardian takes effect once it has taken over. If the guardian cannot be started,
    `socket_dir` is removed, and the file of keys is still the caller's.

    Args:
        config: the supervisor's stdin: secrets are neither on a command line nor in an environment.
        socket_dir: the guardian takes it over, and removes it at the end.
        grace_s: the supervisor's time to stop once the owner has ended.
        owner_pidfd: the process whose end is the job's end; the caller closes it.
        keys_to_remove: a file of keys that the guardian removes as well, "" for none.

    Raises:
        ConfigError: the log cannot be written.
    """
    with contextlib.ExitStack() as until_started, contextlib.ExitStack() as stack:
        until_started.enter_context(socket_dir)
        log = ChildLog.begin(log_path, "guardian and supervisor")
        ready_fd, ready_write_fd = os.pipe()
        stack.callback(os.close, ready_write_fd)
        fds = (owner_pidfd, ready_write_fd, socket_dir.lock_fd)
        interpreter = [sys.executable, "-I", "-S", guardian.__file__]
        # The guardian inherits the mask. Another thread gets the signal meanwhile.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            popen = subprocess.Popen(
                [
                    *interpreter,
                    *map(str, fds),
                    str(socket_dir.path),
                    keys_to_remove,
                    str(grace_s),
                    *supervisor_argv,
                ],
                env=env,
                stdin=stack.enter_context(open_memory_file("config", config)),
                stdout=stack.enter_context(log.open_for_child()),
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                start_new_session=True,
            )
        except OSError:
            os.close(ready_fd)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        stack.close()  # of the pipe, only the guardian has the writing end
        started = GuardianProcess(popen, ready_fd, log)
        until_started.push(started)
        started.wait_until_taken_over()
        until_started.pop_all()
        socket_dir.release()
    return started


def _is_readable(fd: int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))
