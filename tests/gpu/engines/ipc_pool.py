"""Ranks in processes of their own, and a coordinator that updates engines in this one from them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from ipc_rank import DEVICE
from local_images import LocalImages, StrictCoordinator
from torch import Tensor

from umbra.engines.embedded.weight_receiver import WeightReceiver
from umbra.runtime.cluster.socket_dir import FD_SOCKET
from umbra.runtime.engine_api.lifecycle import EngineLifecycle, EngineState
from umbra.runtime.errors import UmbraError
from umbra.runtime.pools.pool_engine import PoolEngine
from umbra.runtime.pools.pool_spec import SyncSettings
from umbra.runtime.pools.sync_coordinator import SyncCoordinator
from umbra.runtime.weights.exports.exported_image import MakeOpener
from umbra.runtime.weights.exports.ipc_memory import CudaOpener, probe_import
from umbra.runtime.weights.image.fd_server import serve_fds
from umbra.runtime.weights.sync_messages import SyncCall

_LIMIT_S = 100.0


class UpdatedEngine(Protocol):
    """The part of `umbra.runtime.engine_api.engine_protocol.Engine` that a sync needs."""

    async def pause(self, mode: Any) -> None: ...
    async def resume(self) -> None: ...
    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str: ...
    async def prepare_update(
        self, version: int, manifest: bytes, buckets: Mapping[str, Any]
    ) -> None: ...
    async def load(self) -> dict[str, int]: ...
    async def verify_update(self, regions: Sequence[Sequence[int | None]]) -> list[str]: ...
    async def commit_update(self) -> None: ...
    async def abort_update(self) -> None: ...


class TensorsOnly:
    """An engine that has tensors and generates nothing."""

    def __init__(self, tensors: Mapping[str, Tensor], make_opener: MakeOpener = CudaOpener) -> None:
        self._receiver = WeightReceiver(tensors, make_opener=make_opener)

    async def pause(self, mode: Any) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str:
        return await asyncio.to_thread(probe_import, allocations)

    async def prepare_update(
        self, version: int, manifest: bytes, buckets: Mapping[str, Any]
    ) -> None:
        await asyncio.to_thread(self._receiver.begin, manifest, buckets)

    async def load(self) -> dict[str, int]:
        return {"nbytes": await asyncio.to_thread(self._receiver.load)}

    async def verify_update(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        return await asyncio.to_thread(self._receiver.verify, regions)

    async def commit_update(self) -> None:
        self._receiver.end()

    async def abort_update(self) -> None:
        self._receiver.abort()

    def close(self) -> None:
        self._receiver.close()


class EngineInPool:
    """An engine of this process as the coordinator sees it; awake, and paused between updates."""

    name = "engine"
    incarnation = 1
    node_id = "here"

    def __init__(self, engine: UpdatedEngine) -> None:
        self.lifecycle = EngineLifecycle().started()
        self.killed: str | None = None
        self._engine = engine

    async def probe_import(self, allocations: list[list[Any]], timeout_s: float) -> str:
        return await self._engine.probe_import(allocations)

    async def pause(self, mode: str, timeout_s: float) -> None:
        if self.lifecycle.state == EngineState.SERVING:
            await self._engine.pause("abort")
            self.lifecycle = self.lifecycle.pause()

    async def resume(self, timeout_s: float) -> None:
        await self._engine.resume()
        self.lifecycle = self.lifecycle.resume()

    async def prepare_update(
        self, version: int, manifest: bytes, buckets: dict[str, Any], timeout_s: float
    ) -> None:
        await self._engine.prepare_update(version, manifest, buckets)

    async def load(self, version: int, timeout_s: float) -> Mapping[str, Any]:
        self.lifecycle = self.lifecycle.begin_update(version)
        return await self._engine.load()

    async def verify_update(self, regions: list[list[int | None]], timeout_s: float) -> list[str]:
        return await self._engine.verify_update(regions)

    async def commit_update(self, version: int, timeout_s: float) -> None:
        await self._engine.commit_update()
        self.lifecycle = self.lifecycle.commit_update(version).resume()

    async def abort_update(self, timeout_s: float) -> None:
        await self._engine.abort_update()
        if self.lifecycle.state == EngineState.UPDATING:
            self.lifecycle = self.lifecycle.abort_update()

    def kill(self, reason: str) -> None:
        self.killed = reason
        self.lifecycle = self.lifecycle.died()


@asynccontextmanager
async def pool_of(
    engine: EngineInPool, folder: Path, **settings: Any
) -> AsyncGenerator[SyncCoordinator]:
    """A coordinator that runs while the block does, with checksums every time."""
    path = str(folder / FD_SOCKET)
    given: dict[str, Any] = {"verify_every": 1}
    async with serve_fds(path) as server, asyncio.TaskGroup() as tasks:
        images = LocalImages(server)
        coordinator = StrictCoordinator(
            "pool", lambda: [cast("PoolEngine", engine)], server, images,
            SyncSettings(**(given | settings)),
        )  # fmt: skip
        running = tasks.create_task(coordinator.run())
        try:
            yield coordinator
        finally:
            running.cancel()
            images.close()


class RankProcess:
    """The test's end of a rank. Calls block; a rank that fails raises with its traceback."""

    def __init__(self, connection: Connection, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._connection = connection

    def call(self, method: str, *arguments: object) -> Any:
        self._connection.send((method, arguments))
        return self.wait_done()

    def wait_done(self) -> Any:
        kind, value = self._receive()
        if kind != "done":
            raise AssertionError(f"a rank failed: {value}")
        return value

    async def publish(
        self, coordinator: SyncCoordinator, version: int, error: str | None = None
    ) -> dict[str, Any]:
        """Its report; raises RankFailed with its traceback."""
        self._connection.send(("publish", (version, error)))
        while True:
            message = await asyncio.to_thread(self._receive)
            if message[0] == "done":
                return message[1]
            if message[0] == "failed":
                raise RankFailed(message[1])
            try:
                answer = ("done", await _ask(coordinator, message[1]))
            except UmbraError as failure:
                answer = ("failed", str(failure))
            self._connection.send(answer)

    def _receive(self) -> Any:
        if not self._connection.poll(_LIMIT_S):
            raise AssertionError(f"a rank said nothing for {_LIMIT_S} s")
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise RankFailed("its process ended") from None

    def close(self) -> None:
        self._connection.close()
        try:
            self.process.wait(20.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class RankFailed(Exception):
    pass


async def _ask(coordinator: SyncCoordinator, call: SyncCall) -> Any:
    async with asyncio.timeout(_LIMIT_S):
        return await coordinator.answer(call)


@contextmanager
def rank_processes(
    folder: Path,
    world_size: int = 1,
    env: Mapping[str, str] | None = None,
    fd_socket: str = FD_SOCKET,
) -> Generator[list[RankProcess]]:
    """Ranks whose GPU is in use by them when the block begins; ended with it.

    Args:
        fd_socket: in the folder, at which they deposit descriptors of their memory.
    """
    program = Path(__file__).with_name("ipc_rank.py")
    ranks: list[RankProcess] = []
    try:
        for rank in range(world_size):
            ours, theirs = Pipe()
            arguments = [str(theirs.fileno()), str(rank), str(world_size), str(folder / "store")]
            arguments.append(str(folder / fd_socket))
            process = subprocess.Popen(
                [sys.executable, str(program), *arguments],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | dict(env or {}),
            )
            theirs.close()
            ranks.append(RankProcess(ours, process))
        for rank in ranks:
            rank.wait_done()
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def in_device_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors of the same shapes and dtypes, with other contents."""
    return {
        name: torch.full(tensor.shape, 77, dtype=tensor.dtype, device=DEVICE)
        for name, tensor in tensors.items()
    }
