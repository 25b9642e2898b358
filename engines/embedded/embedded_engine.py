from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from umbra.engines.embedded.compute_thread import ComputeThread
from umbra.engines.embedded.embedded_settings import EmbeddedConfig
from umbra.engines.embedded.embedded_worker import EmbeddedWorker
from umbra.engines.shell.engine_core import Core, WeightUpdates
from umbra.engines.shell.engine_requests import EngineRequests, RequestCounts
from umbra.engines.shell.engine_shell import EngineShell
from umbra.runtime.engine_api.generation_request import GenerationRequest
from umbra.runtime.engine_api.hub_snapshot import local_model
from umbra.runtime.engine_api.lora import LoraBase
from umbra.runtime.engine_api.token_deltas import DeltaColumns


class EmbeddedEngine(EngineShell["EmbeddedCore"]):
    """umbra's own engine as an actor, in plain torch, for CPU and CUDA. The settings are those of
    `EmbeddedConfig`, by name.

    All torch work happens in one compute thread, so the event loop answers at once whatever the
    model does. If the thread fails, `run` and all later calls and streams raise.
    """

    __signature__ = inspect.signature(EmbeddedConfig)

    def __init__(self, **settings: Any) -> None:
        made = EmbeddedConfig(**settings)
        folder = local_model(made.model_path, with_weights=made.reads_weights)
        config = replace(made, model_path=folder)
        lora_base = LoraBase(Path(folder), config.lora_rank) if config.lora_rank else None
        requests = EmbeddedRequests(lambda: EmbeddedWorker(config), tick_ms=config.tick_ms)
        super().__init__(
            EmbeddedCore(requests.thread, lora_base),
            requests,
            EmbeddedUpdates(requests.thread),
            max_context_len=config.max_context_len,
            load_weights=config.load_weights,
        )


class EmbeddedCore(Core):
    name = "the embedded engine"
    truncates = True
    takes_forced = True
    keeps_requests_asleep = True

    def __init__(self, thread: ComputeThread, lora_base: LoraBase | None) -> None:
        super().__init__(lora_base)
        self._thread = thread

    @property
    def frees_memory_asleep(self) -> bool:
        """False: `memory` already reports the resident bytes."""
        return False

    async def start(self) -> None:
        await self._thread.start()
        self.vocab_size = await self._thread.run(lambda worker: worker.vocab_size)
        await self._note_memory()

    async def stop(self) -> None:
        await self._thread.stop()

    async def pause(self, *, keep: bool) -> None:
        await self._thread.run(lambda worker: worker.pause(keep=keep), flushes=True)
        self.is_paused = True

    async def resume(self) -> None:
        await self._thread.run(lambda worker: worker.resume())
        self.is_paused = False

    async def sleep(self, level: int, tags: Sequence[str]) -> None:
        """Frozen requests are recomputed after the next resume."""
        await self._thread.run(lambda worker: worker.sleep(level, tags))
        await self._note_memory()

    async def wake(self, tags: Sequence[str]) -> None:
        await self._thread.run(lambda worker: worker.wake(tags))
        await self._note_memory()

    async def _note_memory(self) -> None:
        self.memory = await self._thread.run(lambda worker: worker.memory())


class EmbeddedRequests(EngineRequests):
    def __init__(self, build: Callable[[], EmbeddedWorker], *, tick_ms: float) -> None:
        super().__init__()
        self.thread = ComputeThread(build, tick_s=tick_ms / 1000, on_batch=self._on_batch)
        self._ids: set[int] = set()

    @property
    def ids(self) -> Collection[int]:
        return self._ids

    async def run(self) -> None:
        raise await self.thread.failure()

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        self._ids.update(request.id for request in requests)
        self._note_ends()
        await self.thread.run(lambda worker: worker.core.add(requests))

    async def abort(self, ids: Collection[int]) -> None:
        await self.thread.run(lambda worker: worker.core.abort(ids), flushes=True)

    async def deliver(self) -> None:
        """Returns at once: a pause has flushed everything."""

    async def begin_update(self) -> None:
        """Requests share keys only where one pass computes them."""

    def commit_update(self, version: int) -> None:
        self.thread.post(lambda worker: worker.core.set_version(version))

    async def counts(self) -> RequestCounts:
        return await self.thread.run(lambda worker: worker.counts())

    def progress(self) -> int | None:
        """Steps of the model. A job for the compute thread may wait, and has limits of its own."""
        return self.thread.num_steps if self.thread.is_stepping else None

    def _forget(self, epoch: int) -> None:
        self._ids.clear()
        self.thread.begin_epoch(epoch)

    def _on_batch(self, batch: DeltaColumns, epoch: int) -> None:
        if epoch == self.stream.epoch:
            self.stream.put(batch)
            self._ids.difference_update(batch["finished_ids"].tolist())
            self._note_ends()


class EmbeddedUpdates(WeightUpdates):
    """Loads weights straight into the parameters, in the compute thread."""

    def __init__(self, thread: ComputeThread) -> None:
        self._thread = thread

    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str:
        return await self._thread.run(lambda worker: worker.probe_import(allocations))

    async def begin(self, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        await self._thread.run(lambda worker: worker.begin_update(manifest, buckets))

    async def load(self) -> int:
        return await self._thread.run(lambda worker: worker.load_update())

    async def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        return await self._thread.run(lambda worker: worker.receiver.verify(regions))

    def stop(self) -> None:
        self._thread.end_waits()

    async def end(self) -> None:
        await self._thread.run(lambda worker: worker.receiver.end())

    async def abort(self) -> None:
        await self._thread.run(lambda worker: worker.receiver.abort())

    async def release(self) -> None:
        await self._thread.run(lambda worker: worker.receiver.release())

    async def close(self) -> None:
        """The process's end frees the mappings: unmapping here would wait for a hanging step."""
        self._thread.end_waits()
