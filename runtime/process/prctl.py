"""Links a process to its parent and its orphans (Linux `prctl`). Standard library only: the
guardian and the trampoline load this file by its path, with no package."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def die_with_parent(expected_parent_pid: int) -> None:
    """Makes the kernel send SIGKILL to this process when its parent ends. Call it first.

    The signal follows the parent's *thread* that started us, so only a long-lived main thread may
    start children. It survives `exec` (not of set-user-id programs); children do not inherit it. If
    the parent has already ended, as `expected_parent_pid` shows, this process exits at once.
    """
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != expected_parent_pid:
        # The parent died before the call above, so the kernel will send no signal.
        exit_as_orphan(f"parent {expected_parent_pid} has ended: exiting")


def set_parent_death_signal(number: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, number)


def exit_as_orphan(reason: str) -> NoReturn:
    """Exits at once with status 1, and writes a line to stderr if it is still open."""
    with contextlib.suppress(OSError):
        os.write(2, f"{reason}\n".encode())
    os._exit(1)


def become_subreaper() -> None:
    """Makes this process the parent of every descendant whose own parent ends, in any session. A
    daemonised grandchild (double fork, setsid) stays below this process while it lives. The setting
    survives `exec`; children do not inherit it, and the nearest subreaper adopts theirs."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def is_subreaper() -> bool:
    flag = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(flag))
    return flag.value != 0


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")
