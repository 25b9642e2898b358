"""Finds, kills and reaps a process's descendants through /proc.

Standard library only: the guardian loads this file by its path, with no package.

A descendant is found by parentage, never by name, session or environment: with a subreaper above
it (umbra.runtime.process.prctl) no fork, setsid or renamed process can leave its ancestor's tree.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

_LOOK_AGAIN_S = 0.02
"""Longest wait for deaths between two looks at the tree. Longer: a fork that slipped between two
looks lives longer. Shorter: more reading of /proc while a large process frees its memory."""

TRACKER_PATIENCE_S = 2.0
"""For a resource tracker to end once the others have been killed: it needs milliseconds. Shorter
leaves names in /dev/shm on a busy machine; longer waits for one whose tree lives on elsewhere."""

_MAX_LOOKS = 16
"""Looks at a tree in one go. One is enough for what forks seldom; a process that always forks and
ends (its zombies make each look slower) needs its root dead and its zombies reaped between looks.
"""

_PENDING = ("SigPnd:", "ShdPnd:")
"""Of /proc/PID/status: masks of the signals that wait for the process."""

_PF_EXITING = 0x4
"""Of include/linux/sched.h."""


class ProcessStat(NamedTuple):
    """Of /proc/PID/stat. `start_ticks`: start time in clock ticks since boot."""

    state: str
    parent_pid: int
    flags: int
    num_threads: int
    start_ticks: int

    @property
    def is_ending(self) -> bool:
        """Its end has begun: before its descriptors are closed, and long before it is reaped."""
        return bool(self.flags & _PF_EXITING)

    @property
    def has_ended(self) -> bool:
        # A zombie leader with further threads lives on in them.
        return self.state in "ZX" and self.num_threads <= 1


class Identity(NamedTuple):
    """A process beyond doubt, although pids are reused."""

    pid: int
    start_ticks: int


def kill_all_descendants(deadline_s: float) -> list[int]:
    """SIGKILL and reap every descendant of this process, however often they fork meanwhile.

    Blocks until the kernel knows of no child (for orphans to come here, be a subreaper), or until
    the deadline: then the pids that could not be ended are returned (uninterruptible sleep). It
    reaps every child, also those another part of this process waits for: for the very end only.
    """
    begin = time.monotonic()
    deadline = begin + deadline_s
    signalled: set[Identity] = set()
    while True:
        is_patient = time.monotonic() - begin < TRACKER_PATIENCE_S
        kill_tree_below(os.getpid(), signalled, spare_trackers=is_patient)
        if not _reap_every_zombie():
            return []
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return [pid for pid, _ in living_descendants(os.getpid())]
        wait_for_exits(child_pids(os.getpid()), min(left_s, _LOOK_AGAIN_S))


def kill_tree(pid: int) -> None:
    """SIGKILL `pid`, a child of the caller, and all below it but resource trackers; returns before
    they are gone.

    The root is stopped first so that it does not fork between the last look and its own death.
    What forks faster than this looks is left, and goes to the nearest subreaper.
    """
    send_signal(pid, signal.SIGSTOP)
    kill_tree_below(pid, spare_trackers=True)
    send_signal(pid, signal.SIGKILL)


def kill_tree_below(
    pid: int,
    signalled: set[Identity] | None = None,
    spared: Collection[int] = (),
    *,
    spare_trackers: bool = False,
) -> set[Identity]:
    """SIGKILL every descendant of `pid` but the trees of its children in `spared`, and resource
    trackers if wanted.

    Looks again until a look finds nobody new: a process with SIGKILL pending forks no more. Those
    in `signalled` have been dealt with before. Returns `signalled` with the new ones.
    """
    signalled = set() if signalled is None else signalled
    for _ in range(_MAX_LOOKS):
        num_before = len(signalled)
        for identity in living_descendants(pid, spared):
            if identity not in signalled and not (
                spare_trackers and _is_resource_tracker(identity.pid)
            ):
                _kill(identity)
                signalled.add(identity)
        if len(signalled) == num_before:
            break
    return signalled


def living_descendants(pid: int, spared: Collection[int] = ()) -> Iterator[Identity]:
    """Descendants of `pid` that have not ended, without `spared` trees, as they are found.

    Parents come before children, and young siblings before old ones: they fork soonest.
    """
    queue = [child for child in reversed(child_pids(pid)) if child not in spared]
    seen = set(queue)
    for current in queue:
        stat = process_stat(current)
        if stat is None or stat.has_ended:
            continue
        fresh = [child for child in reversed(child_pids(current)) if child not in seen]
        yield Identity(current, stat.start_ticks)
        seen.update(fresh)
        queue.extend(fresh)


def child_pids(pid: int) -> list[int]:
    """Children of `pid`, zombies included; empty where the process is gone.

    The kernel may skip one while a sibling exits, so callers that need all look again.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    pids: list[int] = []
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as listing:
                pids.extend(int(field) for field in listing.read().split())
        except FileNotFoundError:
            if not _HAS_CHILDREN_FILES:
                return scan_child_pids(pid)
        except OSError:
            continue  # The thread ended meanwhile.
    return pids


def working_child_pids(pid: int) -> set[int]:
    """The same without Python's resource tracker, which outlives what it tracks for."""
    return {child for child in child_pids(pid) if not _is_resource_tracker(child)}


def scan_child_pids(pid: int) -> list[int]:
    """The same by reading every process's stat: for kernels without the listings above."""
    pids: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = process_stat(int(name))
            if stat is not None and stat.parent_pid == pid:
                pids.append(int(name))
    return pids


def process_stat(pid: int) -> ProcessStat | None:
    """None where the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read()
    except OSError:
        return None
    # The command name, in parentheses, may hold anything, also spaces and parentheses.
    fields = text[text.rindex(b")") + 2 :].split()
    state, parent_pid, flags = fields[0].decode(), int(fields[1]), int(fields[6])
    return ProcessStat(state, parent_pid, flags, int(fields[17]), int(fields[19]))


def is_dying(pid: int) -> bool:
    """It runs no more of its program: it has ended, is about to, or has been sent SIGKILL."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            pending = [int(line.split()[1], 16) for line in status if line[:7] in _PENDING]
    except OSError:
        return True
    if any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending):
        return True
    # Read second: the signal stops pending before the end begins.
    stat = process_stat(pid)
    return stat is None or stat.is_ending


def send_signal(pid: int, number: int) -> None:
    """Signal a child of the caller; nothing where it has ended. (An unreaped pid is not reused.)"""
    # Not permitted: it runs as another user. Ending the others must not fail for it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def wait_for_exits(pids: Collection[int], timeout_s: float) -> None:
    """Block until one of `pids` has ended (also before), or the time is over."""
    poller = select.poll()
    pidfds: list[int] = []
    try:
        for pid in pids:
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            pidfds.append(pidfd)
            poller.register(pidfd, select.POLLIN)
        poller.poll(timeout_s * 1000)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def _kill(identity: Identity) -> None:
    """SIGKILL exactly this process: a pidfd pins it, then its start time is compared."""
    pid, start_ticks = identity
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        stat = process_stat(pid)
        if stat is not None and stat.start_ticks == start_ticks:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
    finally:
        os.close(pidfd)


def _is_resource_tracker(pid: int) -> bool:
    """A process that only says so gains nothing but the patience for one."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            return b"from multiprocessing.resource_tracker import main" in cmdline.read(4096)
    except OSError:
        return False


def _reap_every_zombie() -> bool:
    """Reap all children that have ended; False when no child is left at all."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


_HAS_CHILDREN_FILES = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
