"""Finds, kills and reaps a process's descendants through /proc.

Standard library only: the guardian loads this file by its path, with no package.

A descendant is found by parentage, never by name, session or environment: with a subreaper above it
(umbra.runtime.process.prctl) no fork, setsid or renamed process can leave its ancestor's tree.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

LOOK_AGAIN_S = 0.02
"""Longest wait for deaths between two scans of the tree. Longer: a fork that a scan missed lives
longer. Shorter: more reading of /proc while a large process frees its memory."""

TRACKER_GRACE_S = 2.0
"""Time for a resource tracker to end once the others have been killed. A shorter limit leaves names
in /dev/shm on a busy machine; a longer one waits for a tracker whose tree is alive elsewhere."""

_MAX_LOOKS = 16
"""Scans of a tree in one call. One is enough for processes that rarely fork. A process that forks
all the time needs its root dead and its zombies, which slow each scan, reaped between scans."""

_PENDING = ("SigPnd:", "ShdPnd:")
"""Fields of /proc/PID/status: masks of the signals that are pending for the process."""

STOPPED = "stopped by a signal"
_STUCK = {
    "T": STOPPED,
    "t": "stopped by a debugger",
    "D": "in a system call that cannot be interrupted",
    "Z": "ended",
    "X": "ended",
}
"""States of proc(5) in which a process does not answer."""

_PF_EXITING = 0x4
"""From include/linux/sched.h."""

_HAS_CHILDREN_FILES = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


class ProcessStat(NamedTuple):
    """Fields of /proc/PID/stat. `start_ticks`: start time in clock ticks since boot."""

    state: str
    parent_pid: int
    flags: int
    num_threads: int
    start_ticks: int

    @property
    def is_stopped(self) -> bool:
        """By a signal; SIGCONT lets it continue."""
        return self.state == "T"

    @property
    def why_stuck(self) -> str:
        """A reason such as "stopped by a signal" why it cannot answer; else ""."""
        return _STUCK.get(self.state, "")

    @property
    def is_ending(self) -> bool:
        """Its end has begun; its descriptors close later, and it is reaped long after."""
        return bool(self.flags & _PF_EXITING)

    @property
    def has_ended(self) -> bool:
        # A zombie leader with other threads is still alive in them.
        return self.state in "ZX" and self.num_threads <= 1


class Identity(NamedTuple):
    """Identifies a process even though pids are reused."""

    pid: int
    start_ticks: int


def kill_all_descendants(deadline_s: float) -> list[int]:
    """Sends SIGKILL to every descendant of this process and reaps it, even while they fork.

    Blocks until the kernel knows of no child (for orphans to come here, be a subreaper), or until
    the deadline; returns the pids that could not be ended (uninterruptible sleep). Call it only at
    the very end: it also reaps children that other parts of this process wait for.
    """
    begin = time.monotonic()
    deadline = begin + deadline_s
    signalled: set[Identity] = set()
    while True:
        is_in_grace = time.monotonic() - begin < TRACKER_GRACE_S
        kill_tree_below(os.getpid(), signalled, spare_trackers=is_in_grace)
        if not _reap_every_zombie():
            return []
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return [pid for pid, _ in living_descendants(os.getpid())]
        wait_for_exits(child_pids(os.getpid()), min(left_s, LOOK_AGAIN_S))


def kill_tree(pid: int) -> None:
    """Sends SIGKILL to the caller's child `pid` and all below it except resource trackers; does not
    wait. The root is stopped first so that it does not fork between the last scan and its own
    death. Processes that fork faster than the scans remain, and go to the nearest subreaper."""
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
    """Sends SIGKILL to every descendant of `pid`, except resource trackers if `spare_trackers`, and
    except the trees of its children in `spared`.

    Scans until a scan finds no new process: one with SIGKILL pending forks no more. Skips processes
    in `signalled`, and returns it with the new ones added.
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
    """Yields descendants of `pid` that have not ended, without `spared` trees. Parents come before
    children, and young siblings before old ones, because they fork soonest."""
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
    """Children of `pid`, zombies included; empty if the process has ended. The kernel may skip a
    child while a sibling exits, so callers that need all of them scan again."""
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
            continue  # the thread ended meanwhile
    return pids


def working_child_pids(pid: int) -> set[int]:
    """`child_pids` without Python's resource tracker, which outlives the processes it serves."""
    return {child for child in child_pids(pid) if not _is_resource_tracker(child)}


def scan_child_pids(pid: int) -> list[int]:
    """`child_pids` for kernels without children files: reads every process's stat."""
    pids: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = process_stat(int(name))
            if stat is not None and stat.parent_pid == pid:
                pids.append(int(name))
    return pids


def ticks_now() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def process_stat(pid: int) -> ProcessStat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read()
    except OSError:
        return None
    # The command name, in parentheses, may itself hold spaces and parentheses.
    fields = text[text.rindex(b")") + 2 :].split()
    state, parent_pid, flags = fields[0].decode(), int(fields[1]), int(fields[6])
    return ProcessStat(state, parent_pid, flags, int(fields[17]), int(fields[19]))


def is_dying(pid: int) -> bool:
    """Whether it no longer runs its program: it has ended, is ending, or has been sent SIGKILL."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            pending = [int(line.split()[1], 16) for line in status if line[:7] in _PENDING]
    except OSError:
        return True
    if any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending):
        return True
    # Read second: the signal stops being pending before the end begins.
    stat = process_stat(pid)
    return stat is None or stat.is_ending


def send_signal(pid: int, number: int) -> None:
    """Signals the caller's child, whose pid is not reused before its reaping;
    ignores ended ones."""
    # PermissionError: the child runs as another user. The others must still be ended.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def wait_for_exits(pids: Collection[int], timeout_s: float) -> None:
    """Blocks until one of `pids` has ended, maybe before the call, or the time is over."""
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
    """Sends SIGKILL to exactly this process: a pidfd pins it, then its start time is compared."""
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
    """A process that imitates the command line gains nothing but a tracker's grace."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            return b"from multiprocessing.resource_tracker import main" in cmdline.read(4096)
    except OSError:
        return False


def _reap_every_zombie() -> bool:
    """Reaps all children that have ended; False if no child is left at all."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


class ProcessTree:
    """A process and its descendants at the last `look`, which reads about one file per thread.
    Ended processes stay in `pids` until the next look, and count for nothing."""

    def __init__(self, root_pid: int) -> None:
        self._root_pid = root_pid
        self.pids = [root_pid]

    def look(self) -> None:
        self.pids = [self._root_pid, *(pid for pid, _ in living_descendants(self._root_pid))]

    def stopped_pids(self) -> list[int]:
        """Processes below the root that a signal has stopped. (A debugger uses another state.)"""
        stats = ((pid, process_stat(pid)) for pid in self.pids[1:])
        return [pid for pid, stat in stats if stat is not None and stat.is_stopped]

    def why_stuck(self) -> str:
        """Why the root may not answer, as far as the kernel knows, or ""."""
        stat = process_stat(self._root_pid)
        if stat is not None and stat.why_stuck:
            return f"it was {stat.why_stuck}"
        stopped = self.stopped_pids()
        return f"its process {stopped[0]} was stopped by a signal" if stopped else ""

    def resident_nbytes(self) -> int:
        """Resident memory. Pages that may be shared count as the most that one process has. A
        weight image that all of them map then counts once. For exact shares (PSS) the kernel would
        have to walk all pages."""
        sizes = [_private_and_shared_nbytes(pid) for pid in self.pids]
        return sum(private for private, _ in sizes) + max(shared for _, shared in sizes)


def _private_and_shared_nbytes(pid: int) -> tuple[int, int]:
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:
            fields = statm.read().split()
        resident, shared = int(fields[1]), int(fields[2])
    except (OSError, IndexError):
        return 0, 0  # the process has ended
    page_nbytes = os.sysconf("SC_PAGE_SIZE")
    return (resident - shared) * page_nbytes, shared * page_nbytes


def own_tree_nbytes() -> int:
    """Bytes resident in this process and its descendants; memory that they share counts once."""
    tree = ProcessTree(os.getpid())
    tree.look()
    return tree.resident_nbytes()
