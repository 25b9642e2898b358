from __future__ import annotations

import os

from umbra.runtime.process.descendants import living_descendants, process_stat


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
