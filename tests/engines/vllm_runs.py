"""One vLLM for all tests of a module: its start takes longer than all of them."""

from __future__ import annotations

import importlib.util
import mmap
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_runs import shared_loop
from torch import Tensor

from umbra.engines.vllm.actor import VllmEngine
from umbra.engines.vllm.core import VllmCore
from umbra.engines.vllm.settings import VllmSettings
from umbra.engines.weight_image import image_tensors
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.memfd import close_fds, create_buckets

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed here; `make test-vllm` installs it in .venv-vllm",
)
MAX_NUM_SEQS = 64
MAX_CONTEXT_LEN = 512


class SharedVllmEngine(VllmEngine):
    """An engine of its own over a vLLM that outlives it.

    Args:
        image: weights to begin with; None: it waits for an update.
    """

    def __init__(
        self, core: VllmCore, folder: Path, image: Mapping[str, Any] | None, **settings: Any
    ) -> None:
        super().__init__(
            model_path=str(folder), dtype="float32", load_weights=image is not None, **settings
        )
        self._shared_core = core
        self._first_image = image

    async def _start_core(self) -> VllmCore:
        core = self._shared_core
        if self._first_image is not None:
            await core.load_weights(self._first_image)
        await core.resume()
        return core

    async def _stop_core(self) -> None:
        core = self._shared_core
        if core.is_paused:
            await core.wake(["weights", "kv_cache"])
        await core.pause(keep=False)
        await core.reset_prefix_cache()


@contextmanager
def running_core(folder: Path, **changes: Any) -> Generator[VllmCore]:
    """A vLLM with the weights in `folder`, on the loop of every `run_async` meanwhile."""
    settings: dict[str, Any] = {
        "model_path": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": MAX_NUM_SEQS,
        "max_context_len": MAX_CONTEXT_LEN,
        "kv_cache_num_tokens": None,
        "num_threads": 1,
        "load_weights": True,
        "engine_args": {},
    }
    with shared_loop() as runner:
        core = VllmCore(VllmSettings(**(settings | changes)))
        try:
            runner.run(core.start())
            runner.run(core.sleep(1))  # starts a thread that vLLM keeps
            runner.run(core.wake(["weights", "kv_cache"]))
            yield core
        finally:
            core.stop()


@contextmanager
def weight_image(tensors: Mapping[str, Tensor]) -> Generator[dict[str, Any]]:
    """The tensors as a sync leaves them: what `VllmCore.load_weights` takes."""
    manifest = Manifest.layout(
        (name, str(t.dtype).removeprefix("torch."), t.shape) for name, t in tensors.items()
    )
    fds = create_buckets(["image"], manifest.nbytes)
    try:
        views = image_tensors(manifest, mmap.mmap(fds["image"], manifest.nbytes))
        for name, tensor in tensors.items():
            views[name].copy_(tensor.detach())
        yield {
            "path": f"/proc/{os.getpid()}/fd/{fds['image']}",
            "nbytes": manifest.nbytes,
            "manifest": manifest.to_wire(),
        }
    finally:
        close_fds(fds)
