"""Ends processes that dead children left behind, while the living children continue.

Every child a supervisor starts is the subreaper of its own descendants (`prctl`), and so is the
supervisor. A process that comes to the supervisor for adoption therefore had its last living
ancestor below it die: it is an orphan, however it renamed or detached itself. Example:

    engine-0 (pid 7) forks a worker (8), which forks a daemon (9, setsid) and exits: 9 goes to 7
    SIGKILL 7: 9 comes to the supervisor, which knows 7 only by its exit: 9 is killed and reaped
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Collection

from umbra.runtime.process import descendants, prctl
from umbra.runtime.process.child_process import living_pids
from umbra.runtime.process.pid_watch import PidWatch

_logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.02
"""Longest wait between two scans: an orphan that forks meanwhile lives that much longer."""


async def end_orphans(deadline_s: float, also_living: Collection[int] = ()) -> list[int]:
    """Sends SIGKILL to all orphans and reaps them; returns the pids that survive the deadline. Call
    it after each child's end, before its successor is started (which may need the memory), and now
    and then besides. `also_living`: children that ChildProcess did not start."""
    clock = asyncio.get_running_loop().time
    begin = clock()
    deadline = begin + deadline_s
    killed = set[descendants.Identity]()

    def look() -> list[int]:
        is_in_grace = clock() - begin < descendants.TRACKER_GRACE_S
        return kill_orphans(also_living, killed, spare_trackers=is_in_grace)

    while remaining := look():
        left_s = deadline - clock()
        if left_s <= 0:
            _logger.warning("orphans %s did not end within %g s", remaining, deadline_s)
            return remaining
        await _wait_for_an_exit(remaining, min(left_s, _LOOK_AGAIN_S))
    return []


def kill_orphans(
    also_living: Collection[int] = (),
    killed: set[descendants.Identity] | None = None,
    *,
    spare_trackers: bool = False,
) -> list[int]:
    """Scans once: kills every orphan not in `killed`, which grows, and reaps; returns
    pids left to reap."""
    if not prctl.is_subreaper():
        raise RuntimeError("only a subreaper gets orphans: call prctl.become_subreaper() at start")
    spared = living_pids() | set(also_living)
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
