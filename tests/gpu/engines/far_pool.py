"""Engines on another "node" of this host, each in a process of its own, for a coordinator."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ipc_pool import EngineInPool

from umbra.runtime.errors import EngineError

_LIMIT_S = 100.0


class FarEngine:
    """The test's end of `far_engine.py`. Owns the process."""

    def __init__(self, connection: Connection, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._connection = connection

    def call(self, method: str, *arguments: object) -> Any:
        """Raises EngineError if the engine fails or is dead."""
        try:
            self._connection.send((method, arguments))
            return self.wait_done()
        except (EOFError, OSError) as error:
            raise EngineError("the engine's process ended") from error

    def wait_done(self) -> Any:
        assert self._connection.poll(_LIMIT_S), f"an engine said nothing for {_LIMIT_S} s"
        kind, value = self._connection.recv()
        if kind != "done":
            raise EngineError(value)
        return value

    async def pause(self, mode: Any) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str:
        return "it is on another node"

    async def prepare_update(
        self, version: int, manifest: bytes, buckets: Mapping[str, Any]
    ) -> None:
        await asyncio.to_thread(self.call, "begin", manifest, buckets)

    async def load(self) -> dict[str, int]:
        return {"nbytes": await asyncio.to_thread(self.call, "load")}

    async def verify_update(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        return await asyncio.to_thread(self.call, "verify", regions)

    async def commit_update(self) -> None:
        await asyncio.to_thread(self.call, "end")

    async def abort_update(self) -> None:
        await asyncio.to_thread(self.call, "end")

    def close(self) -> None:
        self._connection.close()
        self.process.kill()
        self.process.wait()


class FarEngineInPool(EngineInPool):
    node_id = "there"


@contextmanager
def far_engine(env: Mapping[str, str]) -> Generator[FarEngine]:
    """An engine that is ready when the block begins; killed with it."""
    program = Path(__file__).with_name("far_engine.py")
    ours, theirs = Pipe()
    process = subprocess.Popen(
        [sys.executable, str(program), str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | dict(env),
    )
    theirs.close()
    engine = FarEngine(ours, process)
    try:
        engine.wait_done()
        yield engine
    finally:
        engine.close()
