"""Weight updates of engines that load weights by themselves, in processes of their own.

shared memory   ranks ──fill──▶ image of the node ◀──read── Core.load_weights ◀── ImageImport
CUDA IPC        ranks ──exports──────────────────▶ read by  Core.load_weights ◀── WeightImport
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from umbra.engines.loading.image_weights import ImageImport
from umbra.engines.loading.weight_import import WeightImport
from umbra.engines.shell.engine_core import AdapterCore, WeightUpdates
from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.image.mapped_image import KeptImage

_T = TypeVar("_T")


class AdapterUpdates(WeightUpdates):
    """Owns the engine process's mapping of the image, and the thread that checks it."""

    def __init__(self, core: AdapterCore) -> None:
        self._core = core
        self._image = KeptImage()
        self._update: WeightImport | ImageImport | None = None
        self._holds_memory = False  # the core's workers may have memory of ranks or an image open
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-image")

    async def begin(self, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        await self.end()
        if buckets["transport"] == "cuda_ipc":
            self._update = WeightImport(manifest, buckets)
        else:
            self._update = await self._in_thread(
                lambda: ImageImport(self._image, manifest, buckets)
            )
        self._holds_memory = True
        await self._core.open_weights(self._update.description)

    async def is_prepared(self) -> bool:
        return await self._core.is_staged()

    async def load(self) -> int:
        update = self._open_update()
        with update.receiving():
            return update.take_reports(await self._core.load_weights(update.description))

    async def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        update = self._open_update()
        return await self._in_thread(lambda: update.verify(regions))

    def stop(self) -> None:
        if self._update is not None:
            self._update.stop()

    async def end(self) -> None:
        update, self._update = self._update, None
        if isinstance(update, ImageImport):  # of another one, only workers hold anything
            await self._in_thread(update.close)

    async def abort(self) -> None:
        await self.end()
        await self._in_thread(self._image.close)
        if self._holds_memory:
            await self._core.close_memory()
            self._holds_memory = False

    async def release(self) -> None:
        """The image and the ranks' memory stay open: neither is the engine's."""
        await self.end()

    async def close(self) -> None:
        self.stop()
        try:
            await self.end()
            await self._in_thread(self._image.close)
        finally:
            self._thread.shutdown()

    def _open_update(self) -> WeightImport | ImageImport:
        if self._update is None:
            raise WeightSyncError("no update is in progress; prepare_update comes first")
        return self._update

    async def _in_thread(self, job: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)
