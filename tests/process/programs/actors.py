"""Actors that tests start: well-behaved, failing at each point of their lives, and nasty ones."""

from __future__ import annotations

import asyncio
import atexit
import mmap
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from umbra.runtime.actor.actor_spec import actor_context, idempotent
from umbra.runtime.rpc.wire import ActorRef


class Echo:
    """Answers, and says who it is."""

    def __init__(self, greeting: str = "hello") -> None:
        self._greeting = greeting
        self._num_sleeping = 0
        self.num_cancelled = 0

    def echo(self, value: Any) -> Any:
        return value

    def who(self) -> dict[str, Any]:
        context = actor_context()
        return {
            "name": context.name,
            "incarnation": context.incarnation,
            "node_id": context.node_id,
            "pid": os.getpid(),
            "greeting": self._greeting,
        }

    @idempotent
    async def pid(self) -> int:
        return os.getpid()

    @idempotent
    async def wait_for_incarnation(self, incarnation: int) -> int:
        """Returns the pid in that incarnation only."""
        if actor_context().incarnation != incarnation:
            await self.sleep(3600.0)
        return os.getpid()

    def num_waiting(self) -> int:
        return self._num_sleeping

    async def count(self, limit: int) -> AsyncGenerator[int, None]:
        for idx in range(limit):
            yield idx

    async def sleep(self, seconds: float) -> str:
        self._num_sleeping += 1
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self._num_sleeping -= 1
        return "slept"

    async def cancelled(self) -> int:
        return self.num_cancelled

    def block(self, seconds: float) -> str:
        """Holds the event loop, as code that should have been asynchronous does."""
        time.sleep(seconds)
        return "blocked"

    def fail(self, message: str) -> None:
        raise ValueError(message)

    def die(self) -> None:
        """Is killed in the middle of a call."""
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self, status: int) -> None:
        """Ends the process without a word."""
        os._exit(status)

    async def cancel(self, whom: str) -> None:
        """Cancels the process's main task, or all tasks, as careless user code does."""
        for task in asyncio.all_tasks():
            if whom == "all" or task.get_name() == "Task-1":
                task.cancel()

    def signal(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def write(self, text: str) -> None:
        print(text, flush=True)
        print(text.upper(), file=sys.stderr, flush=True)

    def take_memory(self, nbytes: int) -> int:
        self._memory = bytearray(os.urandom(1)) * nbytes
        return len(self._memory)

    def share_memory(self, nbytes: int, num_processes: int) -> list[int]:
        """Maps memory that so many children map and touch, too; their pids."""
        self._shared = mmap.mmap(-1, nbytes)
        self._shared.write(bytes(nbytes))
        return [self._fork_toucher(self._shared) for _ in range(num_processes)]

    def take_memory_in_a_child(self, nbytes: int) -> int:
        return self._fork_toucher(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE))

    @staticmethod
    def _fork_toucher(memory: mmap.mmap) -> int:
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            for at in range(0, len(memory), mmap.PAGESIZE):
                memory[at] = 1
            os.write(write_fd, b"x")
            _sleep_for_ever()
        os.read(read_fd, 1)
        os.close(read_fd)
        os.close(write_fd)
        return pid

    def loaded_modules(self, names: list[str]) -> list[str]:
        return [name for name in names if name in sys.modules]

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def ignore_sigterm(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def fork_family(self) -> list[int]:
        """A plain child, and a daemon (double fork, session of its own, empty environment)."""
        child = os.fork()
        if child == 0:
            _sleep_for_ever()
        return [child, _fork_daemon()]

    def make_names(self) -> list[str]:
        """Names in /dev/shm, as multiprocessing makes them for a child that is there, too."""
        before = set(os.listdir("/dev/shm"))
        context = multiprocessing.get_context("spawn")
        self._kept = (shared_memory.SharedMemory(create=True, size=100), context.Lock())
        child = context.Process(target=time.sleep, args=(3600.0,), daemon=True)
        child.start()
        return sorted(set(os.listdir("/dev/shm")) - before)

    async def ask(self, ref: ActorRef, method: str, *args: Any) -> Any:
        """Calls another actor, also on another node."""
        return await actor_context().connect(ref).call(method, *args, timeout_s=30.0)


class Engine(Echo):
    """As far as its supervisor watches one: it has requests, and gets on with them or does not."""

    def __init__(self) -> None:
        super().__init__()
        self._num_tokens = 0
        self._has_requests = False
        self._is_stuck = False

    def work(self, is_stuck: bool) -> None:
        self._has_requests, self._is_stuck = True, is_stuck

    def progress(self) -> int | None:
        self._num_tokens += not self._is_stuck
        return self._num_tokens if self._has_requests else None


class Meeting:
    """Where ranks wait for each other."""

    def __init__(self) -> None:
        self._arrived: dict[str, int] = {}
        self._changed = asyncio.Condition()

    async def arrive(self, where: str, num_ranks: int) -> None:
        """Returns once so many have arrived there."""
        async with self._changed:
            self._arrived[where] = self._arrived.get(where, 0) + 1
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._arrived[where] >= num_ranks)


class RaisesAtStart:
    def __init__(self, message: str = "no such model") -> None:
        raise ValueError(message)


class ExitsAtStart:
    def __init__(self, status: int = 7) -> None:
        print("last words", flush=True)
        os._exit(status)


class SlowStart:
    """Never comes up."""

    async def __aenter__(self) -> None:
        print("starting for ever", flush=True)
        await asyncio.Event().wait()

    async def __aexit__(self, *exc_info: object) -> None:
        return None


class SlowFirstStart(Echo):
    """Only its first incarnation never comes up."""

    async def __aenter__(self) -> None:
        if actor_context().incarnation == 1:
            await asyncio.Event().wait()

    async def __aexit__(self, *exc_info: object) -> None:
        return None


class ForksAtStart(Echo):
    """Its constructor forks a child that lives on, as an engine's worker does."""

    def __init__(self) -> None:
        super().__init__()
        self._family = self.fork_family()

    def family(self) -> list[int]:
        return self._family


class FailsWhenAgain(Echo):
    """Comes up once; every later incarnation raises at its start."""

    def __init__(self, marker_path: str) -> None:
        super().__init__()
        marker = Path(marker_path)
        if marker.exists():
            raise RuntimeError("the disk is full")
        marker.touch()


class KilledAtStart(Echo):
    """Ends by a signal in each of its first starts."""

    def __init__(self, signum: int, times: int) -> None:
        super().__init__()
        if actor_context().incarnation <= times:
            print(f"start {actor_context().incarnation}", flush=True)
            os.kill(os.getpid(), signum)


class DiesInRun(Echo):
    """Its `run` raises as soon as the marker is there."""

    async def run(self) -> None:
        await asyncio.sleep(0.05)
        print("about to give up", flush=True)
        raise RuntimeError("the replay store is corrupt")


class DiesSlowly(Echo):
    """Its `run` raises when told to, and the interpreter then takes long to end."""

    def __init__(self) -> None:
        super().__init__()
        self._is_over = asyncio.Event()
        atexit.register(time.sleep, 30.0)

    def give_up(self) -> None:
        self._is_over.set()

    async def run(self) -> None:
        await self._is_over.wait()
        raise RuntimeError("the scheduler has ended")


class DiesSoon(Echo):
    """Ends by a signal a moment after each start."""

    async def run(self) -> None:
        await asyncio.sleep(0.02)
        print(f"incarnation {actor_context().incarnation} was here", flush=True)
        os.kill(os.getpid(), 9)


class LeavesSoon(Echo):
    """Ends with exit status 0 a moment after each start."""

    async def run(self) -> None:
        await asyncio.sleep(0.02)
        os._exit(0)


def _sleep_for_ever() -> None:
    while True:
        time.sleep(3600)


def _fork_daemon() -> int:
    read_fd, write_fd = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write_fd, str(os.getpid()).encode())
            os.execve(sys.executable, [sys.executable, "-ISc", "import signal; signal.pause()"], {})
        os._exit(0)
    os.waitpid(middle, 0)
    pid = int(os.read(read_fd, 32))
    os.close(read_fd)
    os.close(write_fd)
    return pid
