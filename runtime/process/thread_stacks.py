"""Shows where the threads of a process are, even threads that hang in native code.

    process                                          reader, of the same user
      |  at its start: a thread, a pipe, and a memory file whose name has the pipe's descriptor
      | <-- a byte into the pipe, by /proc/PID/fd --- |
      | -- stacks of all threads --> memory file      |
      |             /proc/PID/fd --------------------> |

No part needs the right to trace another process, or interrupts it. A process that holds the
interpreter's lock in native code, or is stopped, does not answer: /proc shows its state.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Collection, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from umbra.runtime.process.descendants import process_stat

_NAME: Final = "umbra-thread-stacks"
_LINK: Final = re.compile(rf"/memfd:{_NAME}-(\d+) \(deleted\)")
_ANSWER_LIMIT_S: Final = 2.0
"""Time for the stacks of one process: milliseconds where it runs."""
_LOOK_INTERVAL_S: Final = 0.02
"""Between two looks at a file, which is complete if both find the same length."""
_NUM_READERS: Final = 16


class _Answering:
    def __init__(self) -> None:
        self._requests, self._asking = os.pipe()
        self._file = os.memfd_create(f"{_NAME}-{self._asking}")
        self._thread = threading.Thread(target=self._answer, name=_NAME, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        os.write(self._asking, b"0")
        self._thread.join()
        self.forget()

    def forget(self) -> None:
        for descriptor in (self._requests, self._asking, self._file):
            os.close(descriptor)

    def _answer(self) -> None:
        while os.read(self._requests, 1) != b"0":
            os.write(self._file, "\n".join(_own_stacks()).encode(errors="replace"))


_answering: _Answering | None = None


def answer_stack_requests() -> None:
    """Makes this process and its forks write their threads' stacks on request."""
    global _answering
    if _answering is None:
        _answering = _Answering()


def _answer_in_fork() -> None:
    """A fork has the descriptors of its parent, but not the thread."""
    global _answering
    if _answering is not None:
        _answering.forget()
        _answering = _Answering()


os.register_at_fork(after_in_child=_answer_in_fork)


@contextlib.contextmanager
def answering_stack_requests() -> Generator[None]:
    """Answers within the block; does nothing if the process answers already."""
    global _answering
    if _answering is not None:
        yield
        return
    answer_stack_requests()
    try:
        yield
    finally:
        answering, _answering = _answering, None
        assert answering is not None
        answering.stop()


def read_stacks(pids: Collection[int]) -> dict[int, str]:
    """Stacks of processes in faulthandler's format, or a reason in brackets. May
    block for seconds."""
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        return dict(zip(pids, readers.map(_read, pids), strict=True))


def _read(pid: int) -> str:
    stat = process_stat(pid)
    if stat is None:
        return "[it has ended]"
    if stat.is_stopped:
        return f"[it is {stat.why_stuck}]"
    descriptors = _find_descriptors(pid)
    if descriptors is None:
        return "[its stacks are unknown: it does not run umbra]"
    asking, path = descriptors
    try:
        with open(path, "rb") as file:
            begin = end = file.seek(0, os.SEEK_END)
            requests = os.open(asking, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(requests, b"1")
            finally:
                os.close(requests)
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
    return text or (
        f"[no answer in {_ANSWER_LIMIT_S:g} s: it hangs in the kernel, or in native code that "
        "holds Python's lock]"
    )


def _find_descriptors(pid: int) -> tuple[str, str] | None:
    with contextlib.suppress(OSError):
        folder = f"/proc/{pid}/fd"
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                found = _LINK.fullmatch(os.readlink(f"{folder}/{name}"))
                if found:
                    return f"{folder}/{found[1]}", f"{folder}/{name}"
    return None


def _own_stacks() -> list[str]:
    """The stacks of all threads but this one, each with the innermost call first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    blocks: list[str] = []
    for ident, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
        if ident == threading.get_ident():
            continue
        calls = [
            f'  File "{inner.f_code.co_filename}", line {line} in {inner.f_code.co_name}'
            for inner, line in traceback.walk_stack(frame)
        ]
        title = f"Thread 0x{ident:x} {names.get(ident, '')} (most recent call first):"
        blocks.append("\n".join([title, *calls, ""]))
    return blocks
