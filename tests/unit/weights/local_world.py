"""A pool in one process: the real coordinator, memfds and receivers, engines in threads."""

from __future__ import annotations

import asyncio
import copy
import itertools
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, Self, cast

import pytest
import torch
from local_images import LocalImages, StrictCoordinator
from torch import Tensor

from umbra.engines.embedded.weight_receiver import WeightReceiver
from umbra.runtime.engine_api.lifecycle import EngineLifecycle, EngineState, SleepLevel
from umbra.runtime.engine_api.pool_settings import TRANSPORTS
from umbra.runtime.errors import EngineUnhealthy, UmbraError
from umbra.runtime.pools.pool_engine import PoolEngine
from umbra.runtime.pools.pool_spec import SyncSettings
from umbra.runtime.pools.sync_coordinator import SyncCoordinator
from umbra.runtime.rpc.sync_handle import LoopThread
from umbra.runtime.weights.exports.ipc_memory import CudaOpener, Opener
from umbra.runtime.weights.image.fd_server import serve_fds
from umbra.runtime.weights.shards import flatten
from umbra.runtime.weights.sync_messages import Answer, SyncCall, SyncMessage

IMAGE_TRANSPORTS: Final = [
    pytest.param(row.name, marks=[pytest.mark.slow] if row.crosses_nodes else [])
    for row in TRANSPORTS.values()
    if not row.reads_ranks
]


class ThreadEngine:
    """An engine that only has weights. Loads in a thread, as real engines do.

    Faults are set by tests: `fail_at` and `hang_at` name a request, `load_takes_s` is how long a
    load stands still. `log` holds the requests in order, `limits_s` the time given to each, and
    `buckets` what came with the last prepare_update.
    """

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        make_opener: Callable[[], Opener] = CudaOpener,
    ) -> None:
        self.name = name
        self._make_opener = make_opener
        self.incarnation = 1
        self.node_id = "here"
        self.lifecycle = EngineLifecycle().started()
        self._receiver = WeightReceiver({})
        self.destinations = tensors
        self.load_takes_s = 0.0
        self.log: list[str] = []
        self.limits_s: dict[str, float] = {}
        self.buckets: dict[str, Any] = {}
        self.probed: list[list[list[Any]]] = []
        self.fail_at: str | None = None
        self.hang_at: str | None = None
        self.corrupts_after_load = False
        self.import_problem = "it has no GPU"
        self.hanging = asyncio.Event()
        self._has_died = asyncio.Event()
        self.killed: str | None = None

    @property
    def destinations(self) -> dict[str, Tensor]:
        """Its parameters, which a test may replace between syncs."""
        return self._destinations

    @destinations.setter
    def destinations(self, tensors: Mapping[str, Tensor]) -> None:
        self._destinations = dict(tensors)
        self._receiver.close()
        self._receiver = WeightReceiver(self._destinations, make_opener=self._make_opener)

    async def probe_import(self, allocations: list[list[Any]], timeout_s: float) -> str:
        self.probed.append(allocations)
        if self.hang_at == "probe_import":
            self.hanging.set()
            await self._has_died.wait()
        return self.import_problem

    async def pause(self, mode: str, timeout_s: float) -> None:
        if self.lifecycle.state == EngineState.SERVING:
            self.lifecycle = self.lifecycle.pause()
            await self._request(f"pause {mode}")

    async def resume(self, timeout_s: float) -> None:
        if self.lifecycle.state == EngineState.SERVING:
            return
        await self._request("resume")
        self.lifecycle = self.lifecycle.resume()

    async def prepare_update(
        self, version: int, manifest: bytes, buckets: dict[str, Any], timeout_s: float
    ) -> None:
        self.limits_s["prepare_update"] = timeout_s
        self.buckets = buckets
        await self._request("prepare_update")
        await asyncio.to_thread(self._receiver.begin, manifest, buckets)

    async def load(self, version: int, timeout_s: float) -> dict[str, Any]:
        self.lifecycle = self.lifecycle.begin_update(version)
        await self._request("load")
        await asyncio.sleep(self.load_takes_s)
        nbytes = await asyncio.to_thread(self._receiver.load)
        if self.corrupts_after_load:
            first = next(t for t in self.destinations.values() if t.numel())
            flatten(first).view(torch.uint8)[0] ^= 1
        return {"nbytes": nbytes}

    async def verify_update(self, regions: list[list[int | None]], timeout_s: float) -> list[str]:
        self.limits_s["verify_update"] = timeout_s
        await self._request("verify_update")
        return await asyncio.to_thread(self._receiver.verify, regions)

    async def commit_update(self, version: int, timeout_s: float) -> None:
        await self._request("commit_update")
        self._receiver.end()
        self.lifecycle = self.lifecycle.commit_update(version)
        self.lifecycle = self.lifecycle.resume()

    async def abort_update(self, timeout_s: float) -> None:
        await self._request("abort_update")
        self._receiver.abort()
        if self.lifecycle.state == EngineState.UPDATING:
            self.lifecycle = self.lifecycle.abort_update()

    async def die(self) -> None:
        """Ends what hangs, as the end of a process does."""
        self.lifecycle = self.lifecycle.died()
        self._has_died.set()

    def kill(self, reason: str) -> None:
        self.killed = reason
        self._receiver.close()
        self.lifecycle = self.lifecycle.died()

    def sleep(self, level: SleepLevel) -> None:
        if self.lifecycle.state == EngineState.SERVING:
            self.lifecycle = self.lifecycle.pause()
        self.lifecycle = self.lifecycle.sleep(level)

    def unmap(self) -> None:
        self._receiver.close()

    async def _request(self, what: str) -> None:
        self.log.append(what)
        if what == self.hang_at:
            self.hanging.set()
            await self._has_died.wait()
            raise EngineUnhealthy(f"{self.name}: its process ended")
        if what == self.fail_at:
            raise EngineUnhealthy(f"{self.name} failed at {what}, as the test demands")


class LocalSupervisor:
    """The session of one rank thread, straight to a coordinator on a loop thread."""

    images: LocalImages  # of syncs between nodes
    rank = 0
    world_size = 1
    node_id = "here"
    tcp_host = "127.0.0.1"
    fd_socket = ""  # no GPU exports memory

    def __init__(self, loop: LoopThread, coordinator: SyncCoordinator) -> None:
        self.loop = loop
        self.coordinator = coordinator

    def free_images(self) -> None:
        """Frees what is kept from one sync to the next."""

        async def free() -> None:
            self.coordinator._memory.close()  # pyright: ignore[reportPrivateUsage]
            self.images.close()

        self.loop.run(free())

    def as_rank(self, rank: int, world_size: int, node_id: str = "here") -> Self:
        made = copy.copy(self)
        made.rank, made.world_size, made.node_id = rank, world_size, node_id
        return made

    def raise_if_lost(self) -> None:
        pass

    def sync(self, message: SyncMessage[Answer]) -> Answer:
        answer = self.coordinator.answer(cast("SyncCall", message))
        return cast("Answer", self.loop.run(answer))

    def lose_rank(self, rank: int, when: asyncio.Event) -> float:
        """After how many seconds the sync that it was in is settled."""

        async def lose() -> float:
            async with asyncio.timeout(10.0):
                await when.wait()
            lost_at = time.monotonic()
            self.coordinator.rank_lost(rank)
            await self.coordinator.wait_settled()
            return time.monotonic() - lost_at

        return self.loop.run(lose())


@asynccontextmanager
async def coordinated(
    engines: Sequence[ThreadEngine], settings: SyncSettings, *, require_engine: bool = True
) -> AsyncGenerator[tuple[SyncCoordinator, LocalImages]]:
    """A coordinator that runs while the block does. For a transport between nodes, each engine that
    was "here" is on a node of its own."""
    if settings.transport != "auto" and TRANSPORTS[settings.transport].crosses_nodes:
        for engine in engines:
            if engine.node_id == "here":
                engine.node_id = f"node of {engine.name}"
    # A load blocks its thread, and others wait for it.
    num_threads = len(engines) + 4
    threads = ThreadPoolExecutor(num_threads)
    have_begun = threading.Barrier(num_threads)
    # All now: a test that shares this pool would seem to leave behind a thread that begins later.
    for begun in [threads.submit(have_begun.wait) for _ in range(num_threads)]:
        begun.result()
    asyncio.get_running_loop().set_default_executor(threads)
    with tempfile.TemporaryDirectory(prefix="umbra-test-") as folder:
        path = str(Path(folder) / "fds")
        async with serve_fds(path) as server, asyncio.TaskGroup() as tasks:
            images = LocalImages(server)
            kind = StrictCoordinator if require_engine else SyncCoordinator
            in_pool = cast("Sequence[PoolEngine]", engines)
            coordinator = kind("pool", lambda: in_pool, server, images, settings)
            running = tasks.create_task(coordinator.run())
            try:
                yield coordinator, images
            finally:
                running.cancel()
                images.close()


@contextmanager
def local_pool(
    engines: Sequence[ThreadEngine], settings: SyncSettings, *, require_engine: bool = True
) -> Generator[LocalSupervisor]:
    """The same for code that is not asynchronous."""
    with LoopThread("local-pool") as loop:
        context = coordinated(engines, settings, require_engine=require_engine)
        coordinator, images = loop.run(context.__aenter__())
        supervisor = LocalSupervisor(loop, coordinator)
        supervisor.images = images
        try:
            yield supervisor
        finally:
            loop.run(context.__aexit__(None, None, None))


_versions = itertools.count(1)


def next_version() -> int:
    return next(_versions)


def empty_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous destinations of the same shapes, filled with a pattern that is in no source."""
    destinations: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        flatten(made).view(torch.uint8).fill_(0xA5)
        destinations[name] = made
    return destinations


def raw_bytes(tensor: Tensor) -> bytes:
    """The bytes in row-major order; NaN payloads and signs of zero included."""
    return flatten(tensor.contiguous()).view(torch.uint8).numpy().tobytes()


def in_threads(*calls: Any) -> list[Any]:
    """Runs the calls at once; each one's result or the UmbraError it raised."""
    outcomes: list[Any] = [None] * len(calls)

    def run(idx: int) -> None:
        try:
            outcomes[idx] = calls[idx]()
        except UmbraError as error:
            outcomes[idx] = error

    threads = [threading.Thread(target=run, args=(idx,)) for idx in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    return outcomes
