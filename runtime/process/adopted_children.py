from __future__ import annotations

import _posixsubprocess
import contextlib
import functools
import os
import subprocess
from collections.abc import Callable
from typing import Any

from umbra.runtime.process.descendants import child_pids

_started = set[int]()


def note_own_children() -> None:
    """Called once, before this process starts any other."""
    for module, name in (
        (os, "fork"),
        (os, "forkpty"),
        (os, "posix_spawn"),
        (os, "posix_spawnp"),
        (_posixsubprocess, "fork_exec"),  # of multiprocessing
        (subprocess, "_fork_exec"),
    ):
        setattr(module, name, _noting(getattr(module, name)))


def _noting(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def noting(*args: Any, **kwargs: Any) -> Any:
        outcome: Any = start(*args, **kwargs)
        _started.add(outcome if isinstance(outcome, int) else outcome[0])  # forkpty: (pid, fd)
        return outcome

    return noting


class AdoptedChildren:
    """Reaps this subreaper's adopted children: descendants whose own parent has ended.

    Processes that this one started are left to their owners, who need the exit status. The kernel
    does not tell the two apart, so `note_own_children` notes every way in which Python starts a
    process. A child is reaped when two calls have found it ended, so that a library in C that forks
    and waits at once is not disturbed. A library that waits later loses the exit status.
    """

    def __init__(self) -> None:
        self._had_ended = set[int]()

    def reap(self) -> None:
        """To be called about once a second. Takes microseconds while no child has ended."""
        _started.difference_update([pid for pid in tuple(_started) if _has_ended(pid) is None])
        if not _has_ended(0, os.P_ALL):
            self._had_ended.clear()
            return
        ended = {pid for pid in child_pids(os.getpid()) if pid not in _started and _has_ended(pid)}
        for pid in ended & self._had_ended:
            with contextlib.suppress(ChildProcessError):  # user code waits for any child
                os.waitpid(pid, os.WNOHANG)
        self._had_ended = ended


def _has_ended(pid: int, kind: int = os.P_PID) -> bool | None:
    """Whether a child has; None if this is no child, or one that has been reaped."""
    try:
        return os.waitid(kind, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return None
