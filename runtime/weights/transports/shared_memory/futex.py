"""Waits for a 32-bit word of shared memory to change, across processes: Linux futexes.

Memory order. A writer stores data, then a word that announces it; a reader that sees the word must
see the data. x86 keeps stores in order and loads in order, so nothing is needed there. On other
machines both sides put a full barrier between the two (`order`): a FUTEX_WAKE, which has one in the
kernel (`smp_mb` before it looks for waiters). `wait` loses no wake: the kernel compares and sleeps
in one step.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Final

_MACHINE: Final = platform.machine()
_SYS_FUTEX: Final = 202 if _MACHINE == "x86_64" else 98  # 98: every newer architecture
_FUTEX_WAIT: Final = 0  # not the private kind, which only works between threads
_FUTEX_WAKE: Final = 1
_EVERYBODY: Final = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.POINTER(_Timespec),
)


def wait(address: int, seen: int, timeout_s: float) -> None:
    """Sleeps while the word is `seen`, at most `timeout_s`; may return early without a reason.
    Other threads of the interpreter run meanwhile. A signal ends the wait, so its handler runs."""
    seconds = int(timeout_s)
    timeout = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    _libc.syscall(_SYS_FUTEX, address, _FUTEX_WAIT, seen, ctypes.byref(timeout))


def wake(address: int) -> None:
    _libc.syscall(_SYS_FUTEX, address, _FUTEX_WAKE, _EVERYBODY, None)


def order(address: int) -> None:
    """Orders this thread's earlier reads and writes before its later ones."""
    if _MACHINE != "x86_64":
        wake(address)
