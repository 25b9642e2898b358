"""The engine's side of a weight sync: one image in shared memory, which the engine's workers map.

    ranks ──buckets──▶ WeightImage (engine process) ──▶ every engine worker
                       then compares checksums                  its own loader

The model is not touched before the whole image has arrived.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.transports.shared_memory.memfd import create_memory
from umbra.runtime.weights.weight_receiver import WeightReceiver

_MIN_NBYTES: Final = mmap.PAGESIZE  # of a mapping, even if a model has no bytes


class WeightImage:
    """Receives versions into a flat image of all tensors. Calls block, from one thread except
    `stop`.

    Owns the image, which takes as much memory as the weights. It lives from the first update until
    `close`, so that the next update reuses its pages.
    """

    def __init__(self) -> None:
        self._manifest: bytes | None = None
        self._sync: dict[str, Any] = {}
        self._fd = -1
        self._nbytes = 0
        self._receiver: WeightReceiver | None = None

    def begin(self, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        """Prepares for one version. Raises the errors of `WeightReceiver.begin`."""
        if self._receiver is None or self._manifest != manifest:
            self.close()
            self._open(manifest)
        assert self._receiver is not None
        self._receiver.begin(manifest, buckets)
        known = ("fd_socket", "progress") if "fd_socket" in buckets else ()
        self._sync = {name: buckets[name] for name in known}

    def load(self) -> int:
        """Copies all buckets as they are filled and returns the bytes. Raises WeightSyncError if
        aborted."""
        return self._open_receiver().load()

    def finish(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        """Verifies the image; see `WeightReceiver.finish`."""
        return self._open_receiver().finish(regions)

    def describe(self) -> dict[str, Any]:
        """Describes for the workers where the image is, what it holds, and where to see whether its
        sync was aborted."""
        return {
            "path": f"/proc/{os.getpid()}/fd/{self._fd}",
            "nbytes": self._nbytes,
            "manifest": self._manifest,
            **self._sync,
        }

    def stop(self) -> None:
        """Ends a `load` that waits. From any thread."""
        if self._receiver is not None:
            self._receiver.stop()

    def end(self) -> None:
        """Leaves the update, committed or aborted. Idempotent."""
        if self._receiver is not None:
            self._receiver.end()

    def close(self) -> None:
        """Frees the image. Idempotent."""
        if self._receiver is not None:
            self._receiver.close()
        if self._fd >= 0:
            os.close(self._fd)
        self._receiver, self._manifest, self._fd = None, None, -1

    def _open(self, manifest: bytes) -> None:
        layout = Manifest.from_wire(manifest)
        self._nbytes = max(layout.nbytes, _MIN_NBYTES)
        self._fd = create_memory("umbra-weights", self._nbytes)
        self._manifest = manifest
        self._receiver = WeightReceiver(image_tensors(layout, mmap.mmap(self._fd, self._nbytes)))

    def _open_receiver(self) -> WeightReceiver:
        if self._receiver is None:
            raise WeightSyncError("no update is in progress; begin_update comes first")
        return self._receiver


def image_tensors(manifest: Manifest, memory: mmap.mmap) -> dict[str, Tensor]:
    """The manifest's tensors as views of an image, which stays mapped while they live."""
    image = torch.as_tensor(np.frombuffer(memory, np.uint8))
    tensors: dict[str, Tensor] = {}
    for entry in manifest.entries:
        data = image[entry.offset : entry.end]
        dtype: torch.dtype = getattr(torch, entry.dtype)
        tensors[entry.name] = data.view(dtype).view(entry.shape)
    return tensors
