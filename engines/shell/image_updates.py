"""Weight updates of engines that load weights by themselves, in processes of their own.

shared memory   ranks ──buckets──▶ WeightImage ───description──▶ Core.load_weights
CUDA IPC        ranks ──exports──▶ WeightImport ──description──▶ Core.load_weights

When `load` returns, the model has the weights, whichever transport carried them; `finish` only
verifies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from umbra.engines.shell.engine_core import AdapterCore
from umbra.engines.shell.weight_image import WeightImage
from umbra.engines.shell.weight_import import WeightImport
from umbra.engines.shell.weight_updates import WeightUpdates
from umbra.runtime.errors import WeightSyncError

_T = TypeVar("_T")


class ImageUpdates(WeightUpdates):
    """Owns the image and the thread that fills it."""

    def __init__(self, core: AdapterCore) -> None:
        self._core = core
        self._image = WeightImage()
        self._import: WeightImport | None = None  # set during an update without an image
        self._is_loaded = False
        self._may_hold_exports = False  # the core's workers may have memory of ranks open
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-image")

    async def begin(self, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        self._is_loaded = False
        if buckets["transport"] == "cuda_ipc":
            await self._in_thread(self._image.close)
            self._import = WeightImport(manifest, buckets)
            return
        self._import = None
        await self._in_thread(lambda: self._image.begin(manifest, buckets))

    async def load(self) -> int:
        update = self._import
        if update is None:
            nbytes = await self._in_thread(self._image.load)
            await self._core.load_weights(self._image.describe())
            self._may_hold_exports = False
        else:
            self._may_hold_exports = True
            nbytes = update.note(await self._core.load_weights(update.description))
        self._is_loaded = True
        return nbytes

    async def finish(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        if not self._is_loaded:
            raise WeightSyncError("the weights have not been loaded; load comes first")
        if self._import is not None:
            return self._import.finish(regions)
        return await self._in_thread(lambda: self._image.finish(regions))

    def stop(self) -> None:
        self._image.stop()

    async def end(self) -> None:
        self._import = None
        await self._in_thread(self._image.end)

    async def abort(self) -> None:
        await self.end()
        if self._may_hold_exports:
            await self._core.close_exports()
            self._may_hold_exports = False

    async def release(self) -> None:
        """The ranks' memory is none that the engine could free: it stays open."""
        await self._in_thread(self._image.close)

    async def close(self) -> None:
        self._image.stop()
        try:
            await self._in_thread(self._image.close)
        finally:
            self._thread.shutdown()

    async def _in_thread(self, job: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)
