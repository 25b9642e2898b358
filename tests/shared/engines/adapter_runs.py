"""One foreign engine for all tests of a module: its start takes longer than all of them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from umbra.engines.loading.weight_source import image_tensors
from umbra.engines.sglang.sglang_engine import SglangCore
from umbra.engines.shell.adapter_engine import AdapterEngine
from umbra.engines.vllm.vllm_engine import VllmCore
from umbra.runtime.process.host_memory import create_memory
from umbra.runtime.weights.manifest import Manifest

SharedCore = VllmCore | SglangCore
"""Those that can be left as if they had just been started."""


class SharedEngine(AdapterEngine):
    """An engine of its own over a core that outlives it.

    Args:
        image: weights to begin with; None: those that the core has, or it waits for an update.
        has_weights: the core has weights to serve with.
    """

    def __init__(
        self,
        core: SharedCore,
        image: Mapping[str, Any] | None,
        *,
        has_weights: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(core, load_weights=has_weights or image is not None, **settings)
        self._shared_core = core
        self._first_image = image

    async def _start_core(self) -> None:
        if self._first_image is not None:
            await self._core.ask_workers({"action": "load", "weights": self._first_image})
        await self._core.resume()

    async def _stop_core(self) -> None:
        core = self._shared_core
        if core.is_paused:
            await core.wake(["weights", "kv_cache"])
        await core.pause(keep=False)
        await core.reset_prefix_cache()
        await core.ask_workers({"action": "close"})


@contextmanager
def weight_image(tensors: Mapping[str, Tensor]) -> Generator[dict[str, Any]]:
    """The tensors as a sync leaves them: the "weights" of an order."""
    manifest = Manifest.layout(
        (name, str(t.dtype).removeprefix("torch."), t.shape) for name, t in tensors.items()
    )
    fd = create_memory("image", manifest.nbytes)
    try:
        views = image_tensors(manifest, mmap.mmap(fd, manifest.nbytes))
        for name, tensor in tensors.items():
            views[name].copy_(tensor.detach())
        yield {
            "path": f"/proc/{os.getpid()}/fd/{fd}",
            "nbytes": manifest.nbytes,
            "manifest": manifest.to_wire(),
        }
    finally:
        os.close(fd)
