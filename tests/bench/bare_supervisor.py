"""The supervisor's part of the weights benchmark of engines that are only parameters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import zmq

from umbra.runtime.cluster.job_links import JobLinks
from umbra.runtime.cluster.socket_dir import FD_SOCKET
from umbra.runtime.engine_api.lifecycle import (
    AbortUpdate,
    BeginUpdate,
    CommitUpdate,
    EngineLifecycle,
    EngineStarted,
    EngineState,
    Pause,
    Resume,
)
from umbra.runtime.pools.job_images import JobImages
from umbra.runtime.rpc.actor_ref import ActorRef
from umbra.runtime.rpc.rpc_client import Client, Handle
from umbra.runtime.rpc.rpc_server import ActorServer
from umbra.runtime.weights.sync_calls import (
    SyncAbort,
    SyncBegin,
    SyncEnd,
    SyncFilled,
    SyncProgressed,
)
from umbra.runtime.weights.sync_coordinator import SyncCoordinator, SyncSettings
from umbra.runtime.weights.transports.shared_memory.fd_server import serve_fds
from umbra.runtime.weights.transports.shared_memory.node_images import NodeImages


@asynccontextmanager
async def bare_supervisor(
    folder: Path, pools: Mapping[str, SyncSettings], names: Sequence[str], node_id: str
) -> AsyncGenerator[None]:
    """Serves syncs at `folder`/supervisor while the block runs.

    Args:
        names: of the engines.
        node_id: of their node.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket_path = str(folder / FD_SOCKET)
    async with (
        Client("here") as client,
        serve_fds(socket_path) as fds,
        asyncio.TaskGroup() as tasks,
    ):
        engines = [_Engine(name, node_id, client.handle(_ref(name, folder))) for name in names]
        images = JobImages(NodeImages(fds), node_id, JobLinks(client))
        coordinators = {
            name: SyncCoordinator(name, lambda: engines, fds, images, settings)
            for name, settings in pools.items()
        }
        server = ActorServer(_Supervisor(coordinators), 1)
        server.bind(context.socket(zmq.ROUTER), _ref("supervisor", folder).ipc_endpoint)
        running = [tasks.create_task(server.run())]
        running += [tasks.create_task(c.run()) for c in coordinators.values()]
        try:
            yield
        finally:
            for task in running:
                task.cancel()
    context.term()


def _ref(name: str, folder: Path) -> ActorRef:
    return ActorRef(name=name, incarnation=1, node_id="here", ipc_endpoint=f"ipc://{folder}/{name}")


class _Supervisor:
    """The sync calls of the supervisor, by pool."""

    def __init__(self, coordinators: Mapping[str, SyncCoordinator]) -> None:
        self._coordinators = coordinators

    async def sync_begin(self, call: dict[str, Any]) -> dict[str, Any]:
        begin = SyncBegin.from_wire(call)
        return (await self._coordinators[begin.pool].sync_begin(begin)).to_wire()

    def sync_progress(self, call: dict[str, Any]) -> dict[str, Any]:
        progress = SyncProgressed.from_wire(call)
        return self._coordinators[progress.pool].sync_progress(progress)

    async def sync_filled(self, call: dict[str, Any]) -> None:
        filled = SyncFilled.from_wire(call)
        await self._coordinators[filled.pool].sync_filled(filled)

    async def sync_end(self, call: dict[str, Any]) -> dict[str, Any]:
        end = SyncEnd.from_wire(call)
        return (await self._coordinators[end.pool].sync_end(end)).to_wire()

    def sync_abort(self, call: dict[str, Any]) -> None:
        abort = SyncAbort.from_wire(call)
        self._coordinators[abort.pool].sync_abort(abort)


class _Engine:
    """An engine process as the coordinators see it. It never generates, so pausing is free."""

    incarnation = 1

    def __init__(self, name: str, node_id: str, handle: Handle) -> None:
        self.name = name
        self.node_id = node_id
        self._handle = handle
        self.lifecycle = EngineLifecycle().apply(EngineStarted())

    async def probe_import(self, allocations: list[list[Any]], timeout_s: float) -> str:
        return str(await self._handle.call("probe_import", allocations, timeout_s=timeout_s))

    async def pause(self, mode: str, timeout_s: float) -> None:
        if self.lifecycle.state == EngineState.SERVING:
            self.lifecycle = self.lifecycle.apply(Pause())

    async def resume(self, timeout_s: float) -> None:
        self.lifecycle = self.lifecycle.apply(Resume())

    async def prepare_update(
        self, version: int, manifest: bytes, buckets: dict[str, Any], timeout_s: float
    ) -> None:
        arguments = (version, manifest, buckets)
        await self._handle.call("prepare_update", *arguments, timeout_s=timeout_s)

    async def load(self, version: int, timeout_s: float) -> dict[str, Any]:
        self.lifecycle = self.lifecycle.apply(BeginUpdate(version))
        loaded: dict[str, Any] = await self._handle.call("load", timeout_s=timeout_s)
        return loaded

    async def verify_update(self, regions: list[list[int | None]], timeout_s: float) -> list[str]:
        mismatches: list[str] = await self._handle.call(
            "verify_update", regions, timeout_s=timeout_s
        )
        return mismatches

    async def commit_update(self, version: int, timeout_s: float) -> None:
        await self._handle.call("commit_update", timeout_s=timeout_s)
        self.lifecycle = self.lifecycle.apply(CommitUpdate(version)).apply(Resume())

    async def abort_update(self, timeout_s: float) -> None:
        await self._handle.call("abort_update", timeout_s=timeout_s)
        if self.lifecycle.state == EngineState.UPDATING:
            self.lifecycle = self.lifecycle.apply(AbortUpdate())

    def kill(self, reason: str) -> None:
        raise RuntimeError(f"the engine failed: {reason}")
