"""Adapters added to the weights that they change, for engines that get weights alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard

from umbra.runtime.weights.shards import local_part
from umbra.trainer.model.host_offload import host_buffers
from umbra.trainer.model.lora_layers import matrices_of, merged
from umbra.trainer.model.train_model import TrainModel

_dist: Final[Any] = torch.distributed


class MergedWeights:
    """The frozen weights of a policy, which have its adapters from `merge`, before a sync, to
    `restore`, before the next pass; none if syncs carry adapters. Owns a copy in host memory, of
    which the weights become what they were, bit by bit: to subtract a product would round again."""

    def __init__(self, policy: TrainModel) -> None:
        adapters = policy.adapters
        self._adapters: Mapping[str, Tensor] = {}
        if adapters is not None and adapters.spec is None:
            self._adapters, self._scale = policy.stored, adapters.scale
        self._weights = {
            name: weight
            for name, weight in policy.parameters.items()
            if matrices_of(name, self._adapters)
        }
        self._frozen: dict[str, Tensor] = {}
        self._is_merged = False

    @torch.no_grad()
    def merge(self) -> None:
        """Collective, idempotent. Takes the memory of one weight in float32, and of all adapters,
        whole."""
        if self._is_merged or not self._weights:
            return
        if not self._frozen:
            self._frozen = _host_copies(self._weights)
        matrices = _gathered(self._adapters)
        for name, weight in self._weights.items():
            local_part(weight).copy_(merged(name, weight, matrices, self._scale))
        self._is_merged = True

    def restore(self) -> None:
        """Idempotent. On a GPU, the copies are queued."""
        if self._is_merged:
            for name, weight in self._weights.items():
                local_part(weight).copy_(self._frozen[name], non_blocking=True)
            self._is_merged = False


def _host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = {name: local_part(tensor) for name, tensor in tensors.items()}
    on_gpu = next(iter(parts.values())).is_cuda
    buffers = host_buffers([part.nbytes for part in parts.values()], on_gpu=on_gpu)
    return {
        name: buffer.view(part.dtype).view(part.shape).copy_(part, non_blocking=True)
        for (name, part), buffer in zip(parts.items(), buffers, strict=True)
    }


def _gathered(matrices: Mapping[str, Any]) -> dict[str, Tensor]:
    """Matrices that FSDP2 has sharded, whole: by one collective, because one for each would take
    longer than all the rest."""
    first = next(iter(matrices.values()))
    axis = first.placements.index(Shard(0))
    num_parts: int = first.device_mesh.size(axis)
    if num_parts == 1:
        return {name: local_part(matrix) for name, matrix in matrices.items()}
    parts: list[Tensor] = []
    for matrix in matrices.values():
        part = local_part(matrix)
        num_missing = math.ceil(len(matrix) / num_parts) - len(part)
        parts.append(F.pad(part, (0, 0, 0, num_missing)).flatten())
    sent = torch.cat(parts)
    received: Any = sent.new_empty(num_parts, len(sent))
    _dist.all_gather(list(received), sent, group=first.device_mesh.get_group(axis))
    columns = received.split([len(part) for part in parts], dim=1)
    return {
        name: column.reshape(-1, matrix.shape[1])[: len(matrix)]
        for column, (name, matrix) in zip(columns, matrices.items(), strict=True)
    }
