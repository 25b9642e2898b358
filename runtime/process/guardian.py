"""The guardian: parent of the supervisor; it ends everything below it.

    python -I -S guardian.py OWNER_PIDFD READY_FD LOCK_FD SOCKET_DIR KEYS GRACE_S program [arg ...]

A node's local rank 0 starts it (`start_guardian`) in a session of its own. It uses the standard
library only, about 10 MB resident, because it must outlive whatever kills the supervisor.

It starts `program ... --ready-fd READY_FD --guardian-pid PID` as the supervisor, with the same
stdin, stdout and stderr, and then only waits:

    owner ended                     ──> SIGTERM to the supervisor, GRACE_S seconds for it
    SIGTERM, SIGINT or SIGHUP       ──> the same to the supervisor, which stops the ranks first,
                                        however long their step takes
    another one, a second later     ──> the same, and GRACE_S seconds for it
    supervisor ended, or grace over ──> SIGKILL every descendant, remove SOCKET_DIR and KEYS, exit

Its starter blocks the stop signals, and the guardian unblocks them once it would act on them.
Then it writes an empty line to READY_FD: from then on the guardian, not its starter, removes
SOCKET_DIR and KEYS.

While the supervisor lives, it adopts the orphans below it (it is a subreaper too); once it has
ended, they all come here. If the guardian alone is killed, the supervisor notices by a pidfd and
ends everything itself.

Descriptors, all inherited: OWNER_PIDFD watches the process whose end is the job's end (torchrun's
agent). READY_FD is a pipe's write end that only the supervisor keeps, so that its reader gets
either the supervisor's line or an end of file. LOCK_FD holds the socket directory's lock as long as
guardian or supervisor lives. KEYS is the path of the file of keys that ends with the job, or empty.

Exit status: the supervisor's (128 + N for signal N).
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING

_SAME_REQUEST_S = 1.0
"""Signals that come closer together are one request; see `umbra.runtime.actor.node_context`."""

_KILL_DEADLINE_S = 60.0
"""Time for killing. A process in uninterruptible sleep (a hung device or network file system) would
hold the guardian forever; one that only frees memory needs seconds."""

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from umbra.runtime.process import descendants, prctl
else:
    import importlib.util

    def _sibling(name):  # noqa: ANN001, ANN202 -- types come from the imports above
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    # By path: there is no package here, and this folder on sys.path could shadow the library.
    prctl, descendants = _sibling("prctl"), _sibling("descendants")


def main() -> int:
    owner_pidfd, ready_fd, lock_fd = (int(field) for field in sys.argv[1:4])
    socket_dir, keys, grace_s, program = *sys.argv[4:6], float(sys.argv[6]), sys.argv[7:]
    os.set_inheritable(owner_pidfd, False)
    os.set_inheritable(lock_fd, True)
    prctl.become_subreaper()
    stop_fd = _catch_stop_signals()
    try:
        os.write(ready_fd, b"\n")
        return _guard(program, ready_fd, owner_pidfd, stop_fd, grace_s)
    except OSError as error:
        _log(f"cannot guard {program[0]}: {error}")
        return 127
    finally:
        _end_descendants()
        remove_dir(socket_dir)
        if keys:
            _remove(os.unlink, keys)


def _guard(
    program: list[str], ready_fd: int, owner_pidfd: int, stop_fd: int, grace_s: float
) -> int:
    pid = _start_supervisor(program, ready_fd)
    pidfd = os.pidfd_open(pid)
    watched, stopped_at, deadline = [pidfd, owner_pidfd, stop_fd], math.inf, math.inf
    while (ended := _wait_for(watched, deadline - time.monotonic())) and pidfd not in ended:
        now = time.monotonic()
        if owner_pidfd in ended:
            watched.remove(owner_pidfd)
            number, reason, is_last = signal.SIGTERM, "the owner has ended", True
        else:
            number = signal.Signals(os.read(stop_fd, 1)[0])
            reason, is_last = f"got {number.name}", now - stopped_at > _SAME_REQUEST_S
            stopped_at = min(stopped_at, now)
        if is_last:
            deadline = min(deadline, now + grace_s)
        limit = f" within {deadline - now:g} s" if deadline < math.inf else ""
        _log(f"{reason}: supervisor {pid} has to stop{limit}")
        signal.pidfd_send_signal(pidfd, number)
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    if os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        _log(f"supervisor {pid} is still there: killing it")
        descendants.kill_tree(pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != 0:
        _log(f"supervisor {pid} ended with status {code}")
    return code if code >= 0 else 128 - code


def remove_dir(path: str) -> None:
    """Removes a directory and its contents; a symbolic link in it is removed, not followed."""
    for folder, dirnames, filenames in os.walk(path, topdown=False):
        for name in filenames:
            _remove(os.unlink, os.path.join(folder, name))
        for name in dirnames:
            entry = os.path.join(folder, name)
            _remove(os.unlink if os.path.islink(entry) else os.rmdir, entry)
    _remove(os.rmdir, path)


def _start_supervisor(program: list[str], ready_fd: int) -> int:
    argv = [*program, "--ready-fd", str(ready_fd), "--guardian-pid", str(os.getpid())]
    pid = os.posix_spawnp(
        argv[0],
        argv,
        os.environ,
        setsid=True,
        setsigmask=[],
        # This interpreter ignores both signals at start, and `exec` would pass that on.
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
    )
    os.close(ready_fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)  # stdin may hold secrets.
    return pid


def _catch_stop_signals() -> int:
    """A descriptor that becomes readable at SIGTERM, SIGINT or SIGHUP."""
    stop_fd, wakeup_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in numbers:
        signal.signal(number, _ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    return stop_fd


def _ignore(number: int, frame: FrameType | None) -> None:
    """Does nothing: the wake-up descriptor reports the signal."""


def _wait_for(fds: list[int], timeout_s: float) -> list[int]:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    limit_ms = None if timeout_s == math.inf else max(0.0, timeout_s * 1000)
    return [fd for fd, _ in poller.poll(limit_ms)]


def _end_descendants() -> None:
    survivors = descendants.kill_all_descendants(_KILL_DEADLINE_S)
    if survivors:
        _log(f"could not end {survivors} within {_KILL_DEADLINE_S:g} s")


def _remove(remove: Callable[[str], None], path: str) -> None:
    try:
        remove(path)
    except FileNotFoundError:
        return
    except OSError as error:
        _log(f"cannot remove {path}: {error.strerror}")


def _log(text: str) -> None:
    """Writes one line to the log. An unwritable log must not stop the guardian."""
    try:
        os.write(2, f"{time.strftime('%Y-%m-%d %H:%M:%S')} guardian: {text}\n".encode())
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main())
