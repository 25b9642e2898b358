from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from umbra.runtime.cluster.memory_plan import GIB
from umbra.runtime.process.host_memory import free_nbytes
from umbra.runtime.weights.shards import local_part
from umbra.trainer.model.host_offload import host_buffers
from umbra.trainer.world.mesh import Mesh, any_rank, from_each_rank

logger = logging.getLogger(__name__)

_SHARE: Final = 0.5
"""The most that copies take of a host's free memory. More leaves too little for the engines'
images and sleeping weights; with less, training waits for disks though there is memory."""


class HostCopy:
    """This rank's parts of tensors, in host memory that it owns, reuses, and keeps
    (`host_buffers`)."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._is_short = False  # once a host lacked memory
        self._parts: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copies the parts, by name. None on any rank if a host lacks memory. Collective."""
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        new = {name: part for name, part in parts.items() if name not in self._parts}
        self._is_short = self._is_short or self._lacks_room(sum(p.nbytes for p in new.values()))
        if self._is_short:
            return {}
        on_gpu = self._mesh.device.type == "cuda"
        buffers = host_buffers([part.nbytes for part in new.values()], on_gpu=on_gpu)
        for (name, part), buffer in zip(new.items(), buffers, strict=True):
            self._parts[name] = buffer.view(part.dtype).view(part.shape)
        for name, part in parts.items():
            self._parts[name].copy_(part, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize(self._mesh.device)
        return {name: self._parts[name] for name in parts}

    def _lacks_room(self, nbytes: int) -> bool:
        host = socket.gethostname()
        on_host = sum(more for where, more in from_each_rank((host, nbytes)) if where == host)
        room = int(_SHARE * free_nbytes())
        if on_host > room:
            logger.warning(
                "training waits until checkpoints are written: copies of the trained state would "
                "take %.1f GiB of the memory of %s, and may take %.1f GiB",
                on_host / GIB,
                host,
                room / GIB,
            )
        return any_rank(on_host > room)
