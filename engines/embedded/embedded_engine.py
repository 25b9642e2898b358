"""The embedded engine as an actor: umbra's own engine, in plain torch, for CPU and CUDA.

Target `umbra.engines.embedded.embedded_engine:EmbeddedEngine`. Methods are those of
`engine_protocol.Engine`; all torch work happens in one compute thread, so the event
loop answers at once, whatever the model does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from umbra.engines.embedded.compute_thread import ComputeThread
from umbra.engines.embedded.embedded_settings import EmbeddedConfig
from umbra.engines.embedded.embedded_worker import EmbeddedWorker
from umbra.engines.shell.delta_stream import DeltaStream
from umbra.runtime.engine_api.delta_buffer import DeltaColumns
from umbra.runtime.engine_api.engine_protocol import EngineStats, PauseMode
from umbra.runtime.engine_api.lifecycle import SleepLevel, Tag


class EmbeddedEngine:
    """See `EmbeddedConfig` for the settings; `tick_ms` is the least time between two deltas in
    which no request ends.

    Entering it builds the model; leaving it ends the compute thread. `run()` raises when the
    thread fails, and so do all calls and streams from then on.
    """

    def __init__(
        self,
        *,
        model_path: str,
        dtype: str = "float32",
        device: str = "cpu",
        max_num_seqs: int = 256,
        max_context_len: int,
        kv_cache_num_tokens: int | None = None,
        tick_ms: float = 50.0,
        num_threads: int = 1,
        load_weights: bool = False,
    ) -> None:
        config = EmbeddedConfig(
            model_path=model_path,
            dtype=dtype,
            device=device,
            max_num_seqs=max_num_seqs,
            max_context_len=max_context_len,
            kv_cache_num_tokens=kv_cache_num_tokens,
            num_threads=num_threads,
            load_weights=load_weights,
        )
        self._thread = ComputeThread(
            lambda: EmbeddedWorker(config),
            tick_s=tick_ms / 1000,
            on_batch=self._on_batch,
            on_failure=self._on_failure,
        )
        self._stream = DeltaStream(self._thread.begin_epoch)
        self._failed = asyncio.Event()
        self._failure: Exception | None = None

    async def __aenter__(self) -> Self:
        await self._thread.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._thread.__aexit__(kind, error, trace)

    async def run(self) -> None:
        """Until cancelled; raises EngineError when the compute thread fails."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    def _on_batch(self, batch: DeltaColumns, epoch: int) -> None:
        self._stream.put(batch, epoch)

    def _on_failure(self, error: Exception) -> None:
        self._failure = error
        self._failed.set()
        self._stream.fail(error)

    # -- requests ------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        await self._thread.run(lambda worker: worker.submit(requests))

    async def deltas(self) -> AsyncGenerator[DeltaColumns, None]:
        async with aclosing(self._stream.read()) as batches:
            async for batch in batches:
                yield batch

    async def abort(self, ids: Sequence[int] | None) -> int:
        return await self._thread.run(lambda worker: worker.abort(ids))

    async def pause(self, mode: PauseMode) -> None:
        loop = asyncio.get_running_loop()
        paused = asyncio.Event()

        def on_paused() -> None:
            loop.call_soon_threadsafe(paused.set)

        await self._thread.run(lambda worker: worker.pause(mode, on_paused))
        await paused.wait()

    async def resume(self) -> None:
        await self._thread.run(lambda worker: worker.resume())

    # -- memory --------------------------------------------------------------------------

    async def sleep(self, level: SleepLevel) -> None:
        await self._thread.run(lambda worker: worker.sleep(level))

    async def wake(self, tags: Sequence[Tag]) -> None:
        await self._thread.run(lambda worker: worker.wake(tags))

    # -- weights -------------------------------------------------------------------------

    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str:
        return await self._thread.run(lambda worker: worker.probe_import(allocations))

    async def begin_update(
        self, version: int, manifest: Mapping[str, Any], buckets: Mapping[str, Any]
    ) -> None:
        await self._thread.run(lambda worker: worker.begin_update(version, manifest, buckets))

    async def load(self) -> dict[str, int]:
        return await self._thread.run(lambda worker: worker.load())

    async def finish_update(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        return await self._thread.run(lambda worker: worker.finish_update(regions))

    async def commit_update(self) -> None:
        await self._thread.run(lambda worker: worker.commit_update())

    async def abort_update(self) -> None:
        await self._thread.run(lambda worker: worker.abort_update())

    async def stats(self) -> EngineStats:
        return await self._thread.run(lambda worker: worker.stats())

    def progress(self) -> int | None:
        """Steps of the model; a job for the compute thread may wait, and has limits of its own."""
        return self._thread.num_steps if self._thread.is_stepping else None
