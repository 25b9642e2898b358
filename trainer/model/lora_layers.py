"""LoRA: frozen linear layers with a trained product of two small matrices; Hu et al. 2021,
arXiv:2106.09685. Names, start values and scales are those of PEFT.

PEFT itself would rename the layers' own weights, by which they are read, sharded, published and
exported, and would add dropout and a table of adapters to each forward pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from umbra.runtime.engine_api.lora import PEFT_PREFIX, LoraSpec
from umbra.runtime.engine_api.weight_files import WeightFiles
from umbra.runtime.errors import ConfigError
from umbra.runtime.settings import to_wire
from umbra.runtime.weights.shards import local_part, rows_held
from umbra.trainer.config.trainer_config import LoraSection, ModelSection

FIRST: Final = ".lora_A.weight"
SECOND: Final = ".lora_B.weight"


class LoraLinear(nn.Linear):
    """Takes the place of a linear layer, whose weight keeps its name and does not change.

    I: inputs, O: outputs, R: rank.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        device = base.weight.device
        first = nn.Linear(self.in_features, rank, bias=False, device=device, dtype=dtype)
        second = nn.Linear(rank, self.out_features, bias=False, device=device, dtype=dtype)
        self.lora_A, self.lora_B = first, second  # [R, I] and [O, R]
        self.scale = scale
        self.is_adapted = True

    def forward(self, input: Tensor) -> Tensor:
        output = F.linear(input, self.weight, self.bias)
        if not self.is_adapted:
            return output
        return output + self.scale * self.lora_B(self.lora_A(input))


class LoraAdapters:
    """The adapters of a model, and its only parameters with gradients. Must be made before the
    model is sharded."""

    def __init__(self, model: nn.Module, section: LoraSection, dtype: torch.dtype) -> None:
        """Raises ConfigError if a target matches no layer."""
        self.spec = LoraSpec(rank=section.rank, alpha=section.scale * section.rank)
        model.requires_grad_(False)
        self._layers: dict[str, LoraLinear] = {}
        for name, base in adapted_layers(model, section).items():
            layer = LoraLinear(base, section.rank, section.scale, dtype)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)
            self._layers[name] = layer

    @torch.no_grad()
    def start(self, seed: int) -> None:
        """Gives the matrices their first values: of B 0, and of A uniform ones within
        1 / sqrt(I), which do not depend on the number of ranks. Not collective."""
        for name, layer in self._layers.items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))
            bound = layer.in_features**-0.5
            whole = torch.empty(self.spec.rank, layer.in_features, dtype=torch.float64)
            whole.uniform_(-bound, bound, generator=generator)
            first = layer.lora_A.weight
            rows = rows_held(name, first, 0) if isinstance(first, DTensor) else None
            local_part(first).copy_(whole if rows is None else whole[rows[0] : rows[1]])
            local_part(layer.lora_B.weight).zero_()

    @contextmanager
    def switched_off(self) -> Generator[None]:
        """The model is the one that it started from."""
        self._switch(False)
        try:
            yield
        finally:
            self._switch(True)

    def _switch(self, is_adapted: bool) -> None:
        for layer in self._layers.values():
            layer.is_adapted = is_adapted


def adapted_layers(model: nn.Module, section: LoraSection) -> dict[str, nn.Linear]:
    """The linear layers that get an adapter, by name: those of the targets, or all but the head.
    Layers of other classes, such as quantised ones, multiply in ways of their own and get none.
    Raises ConfigError if a target matches none, or there are none."""
    any_model: Any = model
    head: nn.Module | None = any_model.get_output_embeddings()
    modules: Iterable[tuple[str, nn.Module]] = any_model.named_modules()
    layers = {
        name: module for name, module in modules if type(module) is nn.Linear and module is not head
    }
    if not layers:
        raise ConfigError(
            f"model.lora.rank = {section.rank}: {type(model).__name__} has no layer of the class "
            "nn.Linear below its head: leave model.lora out, or train a model that has"
        )
    return {name: layers[name] for name in section.chosen(layers, type(model).__name__)}


def origin(section: ModelSection) -> dict[str, Any]:
    """The settings of adapters and the model that they change, as `TrainerState` has them: without
    either, they are worth nothing."""
    if not section.lora.rank:
        return {}
    return {"lora": to_wire(section.lora), "base": WeightFiles(section.path).digest()}


def delta(first: Tensor, second: Tensor, scale: float) -> Tensor:
    """[O, I] the change of a layer's weight by its adapter, in at least float32."""
    wide = torch.promote_types(first.dtype, torch.float32)
    return scale * (second.to(wide) @ first.to(wide))


def peft_names(adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices by the names that PEFT and engines know them by."""
    return {f"{PEFT_PREFIX}{name}": matrix for name, matrix in adapters.items()}
