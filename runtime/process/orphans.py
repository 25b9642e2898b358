"""Ends processes that dead children left behind, while the living children continue.

Every child a supervisor starts is the subreaper of its own descendants (`prctl`), and so is the
supervisor. A process that comes to the supervisor for adoption therefore had its last living
ancestor below it die: it is an orphan, however it renamed or detached itself. Example:

    engine-0 (pid 7) forks a worker (8), which forks a daemon (9, setsid) and exits: 9 goes to 7
    SIGKILL 7: 9 comes to the supervisor, which knows 7 only by its exit: 9 is killed and reaped
"""

from __future__ import annotations

import _posixsubprocess
import asyncio
import contextlib
import functools
import logging
import os
import subprocess
from collections.abc import Callable, Collection
from typing import Any

from umbra.runtime.process import descendants, prctl
from umbra.runtime.process.child_process import living_pids
from umbra.runtime.process.descendants import child_pids
from umbra.runtime.process.process_end import PidWatch

_logger = logging.getLogger(__name__)

_started = set[int]()


async def end_orphans(deadline_s: float) -> list[int]:
    """Sends SIGKILL to all orphans and reaps them; returns the pids that survive the deadline. Call
    it after each child's end, before its successor is started (which may need the memory), and now
    and then besides."""
    clock = asyncio.get_running_loop().time
    begin = clock()
    deadline = begin + deadline_s
    killed = set[descendants.Identity]()

    def look() -> list[int]:
        is_in_grace = clock() - begin < descendants.TRACKER_GRACE_S
        return kill_orphans(killed, spare_trackers=is_in_grace)

    while remaining := look():
        left_s = deadline - clock()
        if left_s <= 0:
            _logger.warning("orphans %s did not end within %g s", remaining, deadline_s)
            return remaining
        await _wait_for_an_exit(remaining, min(left_s, descendants.LOOK_AGAIN_S))
    return []


def kill_orphans(
    killed: set[descendants.Identity] | None = None, *, spare_trackers: bool = False
) -> list[int]:
    """Scans once: kills every orphan not in `killed`, which grows, and reaps; returns
    pids left to reap."""
    if not prctl.is_subreaper():
        raise RuntimeError("only a subreaper gets orphans: call prctl.become_subreaper() at start")
    spared = living_pids()
    killed = set() if killed is None else killed
    before = set(killed)
    descendants.kill_tree_below(os.getpid(), killed, spared, spare_trackers=spare_trackers)
    remaining: list[int] = []
    for pid in descendants.child_pids(os.getpid()):
        if pid not in spared and not _reap(pid):
            remaining.append(pid)
    if new := killed - before:
        _logger.info("killed %d processes that a dead child left: %s", len(new), sorted(new))
    return remaining


def _reap(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


async def _wait_for_an_exit(pids: Collection[int], timeout_s: float) -> None:
    ended = asyncio.Event()
    with contextlib.ExitStack() as stack:
        for pid in pids:
            stack.enter_context(PidWatch(pid, ended.set))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await ended.wait()


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
