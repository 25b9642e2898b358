"""Names in /dev/shm, which the whole machine shares and which does not record who made a file."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Final

_FOLDER: Final = "/dev/shm"


def shared_memory_names() -> frozenset[str]:
    try:
        return frozenset(os.listdir(_FOLDER))
    except OSError:
        return frozenset()


def may_belong_to(name: str, pids: Collection[int]) -> bool:
    """Whether a name is this user's, and only processes in `pids` have it open or mapped."""
    path = f"{_FOLDER}/{name}"
    try:
        status = os.lstat(path)
    except OSError:
        return False
    if status.st_uid != os.getuid():
        return False
    others = (int(pid) for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in pids)
    return not any(_has_open(pid, path, status.st_ino) for pid in others)


def _has_open(pid: int, path: str, inode: int) -> bool:
    # Compared by inode: a semaphore is mapped under another name, before it gets its own.
    mapped = f" {inode} ".encode()
    try:
        with open(f"/proc/{pid}/maps", "rb") as maps:
            if any(mapped in line and b"/dev/shm/" in line for line in maps):
                return True
        names = os.listdir(f"/proc/{pid}/fd")
        return any(os.readlink(f"/proc/{pid}/fd/{name}") == path for name in names)
    except OSError:
        return False
