"""A process and all below it: who they are, whether one is stopped, what memory they take."""

from __future__ import annotations

import os

from umbra.runtime.process.descendants import living_descendants, process_stat


class ProcessTree:
    """As of the last `look`, which reads about a file per thread; the rest reads one per process.

    Ended processes stay in `pids` until the next look, and count for nothing.
    """

    def __init__(self, root_pid: int) -> None:
        self._root_pid = root_pid
        self.pids = [root_pid]

    def look(self) -> None:
        """Finds the processes that have come or gone."""
        self.pids = [self._root_pid, *(pid for pid, _ in living_descendants(self._root_pid))]

    def stopped_pids(self) -> list[int]:
        """Those below the root that a signal has stopped. (One that a debugger holds is in another
        state.)"""
        stats = ((pid, process_stat(pid)) for pid in self.pids[1:])
        return [pid for pid, stat in stats if stat is not None and stat.state == "T"]

    def resident_nbytes(self) -> int:
        """Resident memory. Of pages that may be shared it counts the most that one process has.

        So a weight image that all map counts once. Exact shares (PSS) would take the kernel a walk
        over all pages.
        """
        sizes = [_private_and_shared_nbytes(pid) for pid in self.pids]
        return sum(private for private, _ in sizes) + max(shared for _, shared in sizes)


def _private_and_shared_nbytes(pid: int) -> tuple[int, int]:
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:
            fields = statm.read().split()
        resident, shared = int(fields[1]), int(fields[2])
    except (OSError, IndexError):
        return 0, 0  # it has ended
    page_nbytes = os.sysconf("SC_PAGE_SIZE")
    return (resident - shared) * page_nbytes, shared * page_nbytes
