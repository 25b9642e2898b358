"""A real actor process without a supervisor, for tests of calls between processes."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import msgpack
import uvloop

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.process.child_process import PARENT_PID_VARIABLE
from umbra.runtime.process.host_memory import open_memory_file
from umbra.runtime.rpc.curve_keys import CurveKeys
from umbra.runtime.rpc.rpc_client import Client, Handle
from umbra.runtime.rpc.wire import ActorRef
from umbra.runtime.settings import to_wire

PROGRAMS = Path(__file__).parents[2] / "process/programs"
NODE = "node"
START_TIMEOUT_S = 60.0
TEST_TIMEOUT_S = 100.0
AT_ONCE_S = 10.0
"""Far below every deadline used here, far above what a busy machine needs."""

P = ParamSpec("P")
T = TypeVar("T")


class ActorProcess:
    """One incarnation of an actor; a context manager, which ends it."""

    def __init__(
        self,
        folder: Path,
        incarnation: int = 1,
        target: str = "rpc_probe:Probe",
        sys_path: Path = PROGRAMS,
        keys: CurveKeys | None = None,
        tcp_host: str = "",
    ) -> None:
        self.ref = make_ref(folder, incarnation)
        self.heartbeat_endpoint = f"{self.ref.ipc_endpoint}.hb"
        self.log_path = folder / f"probe.{incarnation}.log"
        self._config = _config(self.ref, self.heartbeat_endpoint, target, sys_path, keys, tcp_host)
        self._popen: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        ready_fd, write_fd = os.pipe()
        with self.log_path.open("wb") as log, open_memory_file("config", self._config) as config:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "umbra.runtime.actor.actor_host", str(write_fd)],
                stdin=config,
                stdout=log,
                stderr=log,
                pass_fds=[write_fd],
                env={**os.environ, PARENT_PID_VARIABLE: str(os.getpid())},
            )
        os.close(write_fd)
        with open(ready_fd, "rb") as pipe:
            announced: dict[str, Any] = msgpack.unpackb(pipe.read() or b"\x80")
        if "tcp_endpoint" not in announced:
            self.end()
            raise RuntimeError(f"not started: {announced}\n{self.log()}")
        self.ref = replace(self.ref, tcp_endpoint=announced["tcp_endpoint"])
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send_signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def stop(self) -> None:
        """SIGSTOP; returns once every thread has stopped."""
        self.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def wait(self) -> int:
        return self._popen.wait(START_TIMEOUT_S)

    def end(self) -> None:
        """SIGTERM, and SIGKILL where that does not help."""
        if self._popen.poll() is None:
            self._popen.terminate()
            self._popen.send_signal(signal.SIGCONT)
        try:
            self._popen.wait(30.0)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait(START_TIMEOUT_S)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


def make_ref(folder: Path, incarnation: int = 1) -> ActorRef:
    endpoint = f"ipc://{folder / f'probe.{incarnation}'}"
    return ActorRef(name="probe", incarnation=incarnation, node_id=NODE, ipc_endpoint=endpoint)


def _config(
    ref: ActorRef,
    heartbeat_endpoint: str,
    target: str,
    sys_path: Path,
    keys: CurveKeys | None,
    tcp_host: str,
) -> bytes:
    spec = ActorSpec(name=ref.name, target=target, sys_path=(str(sys_path),))
    supervisor = {
        "name": "supervisor",
        "incarnation": 1,
        "node_id": NODE,
        "ipc_endpoint": f"{ref.ipc_endpoint}.supervisor",
        "tcp_endpoint": "",
    }
    config: bytes = msgpack.packb(
        {
            "spec": to_wire(spec),
            "incarnation": ref.incarnation,
            "num_restarts": 0,
            "node_id": NODE,
            "ipc_endpoint": ref.ipc_endpoint,
            "heartbeat": heartbeat_endpoint,
            "tcp_host": tcp_host,
            "trace_dir": "",
            "keys": [keys.public, keys.secret] if keys else [],
            "supervisor": supervisor,
            "log_level": 20,
        }
    )
    return config


def short_folder() -> tempfile.TemporaryDirectory[str]:
    """For sockets: pytest's own folders are too deep for a Unix socket's path."""
    return tempfile.TemporaryDirectory(prefix="umbra-rpc-")


@asynccontextmanager
async def connected(ref: ActorRef) -> AsyncGenerator[Handle]:
    async with Client(NODE) as client:
        yield client.handle(ref)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """On uvloop, as actors and sessions run, with a deadline."""

    async def in_time() -> T:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            return await coroutine

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(in_time())


def on_uvloop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Makes a test of a coroutine, which `run` runs."""

    @functools.wraps(test)
    def run_test(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return run_test


async def until(
    condition: Callable[[], Awaitable[bool]], timeout_s: float = 60.0, what: str = "it"
) -> None:
    """For what can only be seen from outside by asking again."""
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        await asyncio.sleep(0.01)


async def until_count(probe: Handle, event: str, num: int, timeout_s: float = 60.0) -> None:
    """Waits until the probe has counted so many of its events."""

    async def is_reached() -> bool:
        return await count(probe, event) == num

    await until(is_reached, timeout_s, event)


async def count(probe: Handle, what: str) -> int:
    counts: dict[str, int] = await probe.call("counts", timeout_s=30.0)
    return counts.get(what, 0)


async def read_all(
    probe: Handle, method: str, *args: object, timeout_s: float = 20.0, credits: int = 16
) -> list[Any]:
    async with probe.stream(method, *args, timeout_s=timeout_s, credits=credits) as items:
        return [item async for item in items]
