"""The LoRA adapter of the embedded engine, beside its fused matrices.

R: rows of a fused matrix; E: its columns; N: ranks of the parts that have adapters, in sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from umbra.engines.embedded.parameters import LowRank, Parameters
from umbra.runtime.engine_api.lora import PEFT_PREFIX, LoraSpec, module_shapes
from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.manifest import Manifest

_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The layers, in order, of each fused matrix of `LayerParameters`."""


class Adapters:
    """Owns the matrices that a sync writes, and their products' form beside `parameters`. With a
    scaled product the model computes as the trainer does; a merged weight would be rounded again.

    Attributes:
        matrices: by PEFT's names; empty before the first sync.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._spec: LoraSpec | None = None
        self.matrices: dict[str, Tensor] = {}

    def prepare(self, manifest: Manifest) -> bool:
        """Allocates the matrices that a manifest describes, unless they exist; returns whether it
        did. Raises WeightSyncError for a layer that cannot have any."""
        assert manifest.lora is not None
        self._spec = manifest.lora
        if {name: tuple(matrix.shape) for name, matrix in self.matrices.items()} == manifest.shapes:
            return False
        layers = range(len(self._parameters.layers))
        places = {f"model.layers.{n}.{part}" for n in layers for p in _PARTS.values() for part in p}
        if others := sorted(module_shapes(manifest.shapes).keys() - places):
            raise WeightSyncError(
                f"the embedded engine applies no LoRA adapter to {len(others)} of the layers that "
                f"this one is for: {others[0]}"
            )
        self.matrices = {
            name: torch.empty(shape, dtype=self._parameters.dtype, device=self._parameters.device)
            for name, shape in manifest.shapes.items()
        }
        return True

    def apply(self) -> None:
        """Gives new matrices to all later passes."""
        for idx, layer in enumerate(self._parameters.layers):
            layer.adapters = {
                field: fused
                for field, parts in _PARTS.items()
                if (fused := self._fuse([f"model.layers.{idx}.{part}" for part in parts]))
            }

    def _fuse(self, names: list[str]) -> LowRank | None:
        """The adapters of the parts of one matrix as one; None if there are none."""
        assert self._spec is not None
        pairs = [
            [self.matrices.get(f"{PEFT_PREFIX}{name}.lora_{x}.weight") for x in "AB"]
            for name in names
        ]
        firsts = [first for first, _ in pairs if first is not None]
        if not firsts:
            return None
        rows = [len(self._parameters.destinations[f"{name}.weight"]) for name in names]
        first = torch.cat(firsts)  # [N, E]
        second = first.new_zeros(sum(rows), len(first))  # [R, N]
        row = column = 0
        for num_rows, (_, of_part) in zip(rows, pairs, strict=True):
            if of_part is not None:
                block = second[row : row + num_rows, column : column + of_part.shape[1]]
                torch.mul(of_part, self._spec.alpha / self._spec.rank, out=block)
                column += of_part.shape[1]
            row += num_rows
        return LowRank(first, second)
