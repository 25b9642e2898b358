"""Shows where the threads of a process are, also those that hang in native code.

    process                                       reader, of the same user
      |  at its start: a handler of SIGUSR2, and a memory file of a certain name
      | <-------------------- SIGUSR2 -------------- |  only to a process that has both
      | -- stacks of all threads --> memory file     |
      |               /proc/PID/fd/N --------------> |

Python's faulthandler writes the stacks in the signal handler itself, so no thread has to return
from native code, and nothing needs the right to trace another process. It reads the frames of other
threads while they run, which can crash a process whose threads recurse deeply. A process that is
stopped gets no signal: /proc shows its state.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from umbra.runtime.process.descendants import process_stat

_SIGNAL: Final = signal.SIGUSR2
_NAME: Final = "umbra-thread-stacks"
_LINK: Final = f"/memfd:{_NAME} (deleted)"
_ANSWER_LIMIT_S: Final = 2.0
"""For the stacks of one process: milliseconds where it runs. A process in a system call that cannot
be interrupted never answers, and delays the others of the same file by this time."""
_LOOK_INTERVAL_S: Final = 0.02
"""Between two looks at a file, which is complete if both find the same length. With a shorter
interval, the stacks of hundreds of threads could be cut off."""
_NUM_READERS: Final = 16


_descriptors: Final[list[int]] = []
"""The file of this process, and of what it forks, as soon as it has one."""


def answer_stack_requests() -> None:
    """Makes this process, and what it forks, write the stacks of its threads on request."""
    if not _descriptors:
        _descriptors.append(os.memfd_create(_NAME))
        faulthandler.register(_SIGNAL, file=_descriptors[0], all_threads=True)


@contextlib.contextmanager
def answering_stack_requests() -> Generator[None]:
    """Does so within the block, unless the process does anyway."""
    if _descriptors:
        yield
        return
    answer_stack_requests()
    try:
        yield
    finally:
        faulthandler.unregister(_SIGNAL)
        os.close(_descriptors.pop())


def read_stacks(pids: Collection[int]) -> dict[int, str]:
    """The stacks of processes, as faulthandler writes them, with the thread that handled the signal
    last; the reason in brackets for a process without. Blocks for some seconds at most."""
    by_file: defaultdict[object, list[tuple[int, str]]] = defaultdict(list)
    stacks = dict.fromkeys(pids, "[it has ended]")
    for pid in pids:
        path = _find_file(pid)
        stat = process_stat(pid)
        if stat is None:
            stacks[pid] = "[it has ended]"
        elif stat.state == "T":
            stacks[pid] = "[it is stopped by a signal]"
        elif path is None or not _handles_signal(pid):
            stacks[pid] = "[its stacks are unknown: it does not run umbra]"
        else:
            with contextlib.suppress(OSError):  # it has ended
                file = os.stat(path)
                by_file[file.st_dev, file.st_ino].append((pid, path))
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        for found in readers.map(_read_in_turn, by_file.values()):
            stacks |= found
    return stacks


def _read_in_turn(processes: list[tuple[int, str]]) -> dict[int, str]:
    """Forks of one process write to one file."""
    return {pid: _read(pid, path) for pid, path in processes}


def _read(pid: int, path: str) -> str:
    try:
        with open(path, "rb") as file:
            begin = end = file.seek(0, os.SEEK_END)
            os.kill(pid, _SIGNAL)
            deadline = time.monotonic() + _ANSWER_LIMIT_S
            while time.monotonic() < deadline:
                time.sleep(_LOOK_INTERVAL_S)
                before, end = end, file.seek(0, os.SEEK_END)
                if begin < before == end:
                    break
            file.seek(begin)
            text = file.read(end - begin).decode(errors="replace")
    except OSError as error:
        return f"[its stacks cannot be read: {error.strerror}]"
    return text or f"[no answer in {_ANSWER_LIMIT_S:g} s: it hangs in the kernel]"


def _find_file(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        folder = f"/proc/{pid}/fd"
        for name in os.listdir(folder):
            path = f"{folder}/{name}"
            with contextlib.suppress(OSError):
                if os.readlink(path) == _LINK:
                    return path
    return None


def _handles_signal(pid: int) -> bool:
    """A program that was executed since has the file no more, nor the handler; nor has one that
    replaced the handler."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (_SIGNAL - 1) & 1)
    return False
