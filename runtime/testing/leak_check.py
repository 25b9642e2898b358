"""Finds what a test leaves behind: processes, descriptors, threads, shared memory.

    check = LeakCheck()
    ...
    for leak in check.finish(grace_s=2.0):
        print(leak)

Each look at /proc takes less than a millisecond in a plain process and two to three where torch is
loaded. Only if two looks differ is there a slower one: it collects garbage, waits for exits and
joins, and then reports the rest.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from typing import Final

import uvloop

from umbra.runtime.process import descendants
from umbra.runtime.process.descendants import Identity
from umbra.runtime.process.prctl import become_subreaper

_SHARED_MEMORY: Final = "/dev/shm"
"""The whole machine shares this folder, which does not record who made a file there."""
# Interval while waiting for descriptors and shared memory, for which there is no event.
_LOOK_AGAIN_S: Final = 0.02
_KILL_WAIT_S: Final = 5.0
# Opened once by a library and kept until the process ends: not the test's doing.
_PERMANENT_FILES: Final = ("/dev/urandom", "/dev/random", "/dev/nvidia", "/dev/kfd", "/dev/dri/")
# Memory that libraries keep: for code that they generate (ctypes callbacks, oneDNN kernels), and
# semaphores (tqdm has a lock for all processes).
_PERMANENT_MEMORY: Final = ("/memfd:libffi", "/memfd:xbyak", "/dev/shm/sem.")


def prepare() -> None:
    """Creates permanent resources of the process before a test can be blamed for them."""
    # Otherwise init would adopt a daemonised grandchild, and the check would miss it.
    become_subreaper()
    # libuv opens a pipe with the first loop of a process and never closes it.
    uvloop.new_event_loop().close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The resources of this process at one moment. A descriptor (number, target) is another one
    with another target; mappings (name, inode) are anonymous files and shared memory."""

    processes: frozenset[Identity]
    descriptors: frozenset[tuple[int, str]]
    threads: frozenset[threading.Thread]
    mappings: frozenset[tuple[str, int]]
    shared_memory: frozenset[str]

    @classmethod
    def take(cls) -> Look:
        return cls(
            processes=frozenset(descendants.living_descendants(os.getpid())),
            descriptors=frozenset(_descriptors()),
            threads=frozenset(_threads()),
            mappings=frozenset(_mappings()),
            shared_memory=shared_memory_names(),
        )

    def since(self, before: Look) -> Look:
        return Look(
            **{
                field.name: getattr(self, field.name) - getattr(before, field.name)
                for field in fields(self)
            }
        )

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))


class LeakCheck:
    def __init__(self) -> None:
        self._helpers = _of_helpers("_pid", "_forkserver_pid")
        self._has_cuda = _has_cuda()
        self._children = _children()
        self._before = Look.take()

    def finish(self, grace_s: float) -> list[str]:
        """Returns one line for each leak; empty if nothing was left. Waits up to `grace_s`
        seconds for what is ending. Reported processes are killed, so that they do not disturb
        the next test."""
        if not self._new():
            return []
        deadline = time.monotonic() + grace_s
        while True:
            gc.collect()  # each time: what a thread refers to becomes garbage when it ends
            _end_zmq_collector()
            new = self._new()
            left_s = deadline - time.monotonic()
            if not new or left_s <= 0:
                break
            _wait_for_an_end(new, left_s)
        lines = list(_describe(new))
        self._kill(new.processes)
        return lines

    def _new(self) -> Look:
        self._reap_adopted()
        new = Look.take().since(self._before)
        if not new:
            return new
        helpers = self._helpers | _of_helpers("_pid", "_forkserver_pid")
        pipes = _of_helpers("_fd", "_forkserver_alive_fd")
        if _has_cuda() and not self._has_cuda:
            # The first test that uses CUDA creates its context, which the process keeps.
            pipes |= {number for number, _ in new.descriptors}
        ours = {os.getpid(), *(pid for pid, _ in descendants.living_descendants(os.getpid()))}
        return Look(
            processes=frozenset(p for p in new.processes if p.pid not in helpers),
            descriptors=frozenset(d for d in new.descriptors if d[0] not in pipes),
            threads=frozenset(t for t in new.threads if not _is_permanent_thread(t)),
            mappings=new.mappings,
            shared_memory=frozenset(n for n in new.shared_memory if may_belong_to(n, ours)),
        )

    def _reap_adopted(self) -> None:
        """Reaps new zombies: as a subreaper this process adopts them, and nobody else waits."""
        for pid in descendants.child_pids(os.getpid()):
            stat = descendants.process_stat(pid)
            if (
                stat is None
                or not stat.has_ended
                or Identity(pid, stat.start_ticks) in self._children
            ):
                continue
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue

    def _kill(self, leaked: frozenset[Identity]) -> None:
        before = {identity.pid for identity in self._before.processes}
        killed = [
            pid for pid, ticks in leaked if not _is_below(pid, before) and _is_alive(pid, ticks)
        ]
        for pid in killed:
            descendants.send_signal(pid, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_WAIT_S
        for pid in killed:
            descendants.wait_for_exits([pid], max(0.0, deadline - time.monotonic()))
        self._reap_adopted()


def _descriptors() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing's own descriptor
        # A library's own files: matplotlib keeps its fonts open.
        if not target.startswith(_PERMANENT_FILES) and "/site-packages/" not in target:
            yield int(name), target


def _threads() -> Iterator[threading.Thread]:
    return (thread for thread in threading.enumerate() if thread.is_alive())


def _mappings() -> Iterator[tuple[str, int]]:
    with open("/proc/self/maps", "rb") as maps:
        text = maps.read()
    if b"/memfd:" not in text and b"/dev/shm/" not in text:
        return
    for line in text.splitlines():
        if b"/memfd:" in line or b"/dev/shm/" in line:
            fields = line.split(maxsplit=5)
            name = fields[5].decode(errors="replace")
            if not name.startswith(_PERMANENT_MEMORY):
                yield name, int(fields[4])


def _children() -> frozenset[Identity]:
    found: list[Identity] = []
    for pid in descendants.child_pids(os.getpid()):
        stat = descendants.process_stat(pid)
        if stat is not None:
            found.append(Identity(pid, stat.start_ticks))
    return frozenset(found)


def _of_helpers(of_tracker: str, of_forkserver: str) -> frozenset[int]:
    """A pid or descriptor of each process that `multiprocessing` starts once and keeps: not the
    test's doing."""
    helpers = (
        ("multiprocessing.resource_tracker", "_resource_tracker", of_tracker),
        ("multiprocessing.forkserver", "_forkserver", of_forkserver),
    )
    found = [
        getattr(getattr(sys.modules[module], helper), attribute, None)
        for module, helper, attribute in helpers
        if module in sys.modules
    ]
    return frozenset(number for number in found if number)


def _has_cuda() -> bool:
    """Whether this process has a CUDA context, which keeps pipes and eventfds of its own."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _is_permanent_thread(thread: threading.Thread) -> bool:
    # Dummies represent threads that native code made; tqdm keeps one monitor forever.
    kind = type(thread)
    return kind.__name__ == "_DummyThread" or kind.__module__.startswith("tqdm")


def _end_zmq_collector() -> None:
    """Ends the thread that pyzmq starts with the first message it does not copy, and then keeps.
    Its descriptors do not show their owner. The thread starts again when needed."""
    garbage = sys.modules.get("zmq.utils.garbage")
    if garbage is not None and not garbage.gc.refs:
        garbage.gc.stop()


def _wait_for_an_end(new: Look, timeout_s: float) -> None:
    if new.processes:
        # In slices, because a leaked thread's or descriptor's end should be noticed as well.
        descendants.wait_for_exits([pid for pid, _ in new.processes], min(timeout_s, 0.25))
    elif new.threads:
        next(iter(new.threads)).join(min(timeout_s, 0.25))
    else:
        select.select([], [], [], min(timeout_s, _LOOK_AGAIN_S))


def _describe(leaked: Look) -> Iterator[str]:
    for pid, _ in sorted(leaked.processes):
        yield f"process {pid} (child of {_parent_of(pid)}): {_command(pid)}"
    for thread in leaked.threads:
        kind = "daemon thread" if thread.daemon else "thread"
        yield f"{kind} {thread.name!r} ({_where(thread)})"
    for number, target in sorted(leaked.descriptors):
        yield f"descriptor {number} -> {target}"
    mapped = {name for name, _ in leaked.mappings}
    yield from (f"mapped memory {name}" for name in sorted(mapped))
    yield from (f"shared memory /dev/shm/{name}" for name in sorted(leaked.shared_memory))


def _parent_of(pid: int) -> str:
    stat = descendants.process_stat(pid)
    if stat is None:
        return "?"
    return "this process" if stat.parent_pid == os.getpid() else str(stat.parent_pid)


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            words = cmdline.read().rstrip(b"\0").split(b"\0")
    except OSError:
        return "?"
    text = " ".join(word.decode(errors="replace") for word in words)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _where(thread: threading.Thread) -> str:
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frame = frames.get(thread.ident or 0)
    if frame is None:
        return "not running"
    return f"in {frame.f_code.co_name}, {frame.f_code.co_filename}:{frame.f_lineno}"


def _is_below(pid: int, ancestors: set[int]) -> bool:
    while pid not in (0, 1, os.getpid()):
        stat = descendants.process_stat(pid)
        if stat is None:
            return False
        pid = stat.parent_pid
        if pid in ancestors:
            return True
    return False


def _is_alive(pid: int, start_ticks: int) -> bool:
    stat = descendants.process_stat(pid)
    return stat is not None and not stat.has_ended and stat.start_ticks == start_ticks


def shared_memory_names() -> frozenset[str]:
    try:
        return frozenset(os.listdir(_SHARED_MEMORY))
    except OSError:
        return frozenset()


def may_belong_to(name: str, pids: Collection[int]) -> bool:
    """Whether a name is this user's, and only processes in `pids` have it open or mapped."""
    path = f"{_SHARED_MEMORY}/{name}"
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
