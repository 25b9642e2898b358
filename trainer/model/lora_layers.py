"""LoRA: frozen layers with a trained product of two small matrices; Hu et al. 2021,
arXiv:2106.09685. Names, start values and scales are those of PEFT.

PEFT itself would rename the layers' own weights, by which they are read, sharded, published and
exported, and would add dropout and a table of adapters to each forward pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from umbra.runtime.engine_api.lora import EMBEDDING, LINEAR, PEFT_PREFIX, LoraSpec
from umbra.runtime.engine_api.weight_files import WeightFiles
from umbra.runtime.errors import ConfigError
from umbra.runtime.settings import to_wire
from umbra.runtime.weights.shards import local_part, rows_held
from umbra.trainer.config.trainer_config import LoraSection, ModelSection


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

    def widened(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """[..., I + R] and [O, I + R], whose product is the output without bias."""
        if not self.is_adapted:
            return input, self.weight
        inner = self.scale * self.lora_A(input)
        return torch.cat((input, inner), -1), torch.cat((self.weight, self.lora_B.weight), 1)

    @torch.no_grad()
    def start(self, name: str, generator: torch.Generator) -> None:
        bound = self.in_features**-0.5
        first = torch.empty(self.lora_A.weight.shape, dtype=torch.float64)
        _write(name, self.lora_A.weight, first.uniform_(-bound, bound, generator=generator))
        local_part(self.lora_B.weight).zero_()


class LoraEmbedding(nn.Embedding):
    """Takes the place of an embedding, as `LoraLinear` does of a linear layer.

    V: vocabulary, E: width, R: rank.
    """

    def __init__(self, base: nn.Embedding, rank: int, scale: float, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = size, width = base.weight.shape
        self.padding_idx, self.weight = base.padding_idx, base.weight
        device = base.weight.device
        self.lora_embedding_A = nn.Parameter(torch.empty(rank, size, device=device, dtype=dtype))
        self.lora_embedding_B = nn.Parameter(torch.empty(width, rank, device=device, dtype=dtype))
        self.scale = scale
        self.is_adapted = True

    def forward(self, input: Tensor) -> Tensor:
        output = F.embedding(input, self.weight)
        if not self.is_adapted:
            return output
        rows = F.embedding(input, self.lora_embedding_A.t())
        return output + self.scale * F.linear(rows, self.lora_embedding_B)

    @torch.no_grad()
    def start(self, name: str, generator: torch.Generator) -> None:
        second = torch.empty(self.lora_embedding_B.shape, dtype=torch.float64)
        local_part(self.lora_embedding_A).zero_()
        _write(name, self.lora_embedding_B, second.normal_(generator=generator))


class LoraAdapters:
    """The adapters of a model, and its only parameters with gradients. Must be made before the
    model is sharded."""

    def __init__(self, model: nn.Module, section: LoraSection, dtype: torch.dtype) -> None:
        """Raises ConfigError if a target matches no layer."""
        self.spec = LoraSpec(rank=section.rank, alpha=section.scale * section.rank)
        model.requires_grad_(False)
        self._layers: dict[str, LoraLinear | LoraEmbedding] = {}
        for name, base in adapted_layers(model, section).items():
            options = section.rank, section.scale, dtype
            is_linear = isinstance(base, nn.Linear)
            layer = LoraLinear(base, *options) if is_linear else LoraEmbedding(base, *options)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)
            self._layers[name] = layer

    def start(self, seed: int) -> None:
        """Gives the matrices their first values, whose product is 0: to A uniform ones within
        1 / sqrt(I), or to B of an embedding normal ones. They do not depend on the number of ranks.
        Not collective."""
        for name, layer in self._layers.items():
            layer.start(name, torch.Generator().manual_seed(zlib.crc32(name.encode(), seed)))

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


def adapted_layers(model: nn.Module, section: LoraSection) -> dict[str, nn.Linear | nn.Embedding]:
    """The layers that get an adapter, by name: those of the targets, or all linear ones of decoder
    blocks. Layers of other classes, such as quantised ones, multiply in ways of their own and get
    none. Raises ConfigError if a target matches none, or there are none."""
    any_model: Any = model
    embeddings, head = any_model.get_input_embeddings(), any_model.get_output_embeddings()
    modules: Iterable[tuple[str, nn.Module]] = any_model.named_modules()
    layers: dict[str, nn.Linear | nn.Embedding] = {
        name: module
        for name, module in modules
        if type(module) is nn.Linear or (module is embeddings and type(module) is nn.Embedding)
    }
    is_tied = head is not None and head.weight is embeddings.weight
    names = section.chosen(layers, type(model).__name__, is_tied=is_tied)
    if not names:
        raise ConfigError(
            f"model.lora.rank = {section.rank}: {type(model).__name__} has no layer of the class "
            "nn.Linear below its head: leave model.lora out, or train a model that has"
        )
    return {name: layers[name] for name in names}


def origin(section: ModelSection) -> dict[str, Any]:
    """The settings of adapters and the model that they change, as `TrainerState` has them: without
    either, they are worth nothing."""
    if not section.lora.rank:
        return {}
    return {"lora": to_wire(section.lora), "base": WeightFiles(section.path).digest()}


def adapter_shapes(name: str, layer: nn.Linear | nn.Embedding, rank: int) -> dict[str, list[int]]:
    """The names and shapes of a layer's matrices."""
    rows, columns = layer.weight.shape
    if isinstance(layer, nn.Linear):
        return {name + LINEAR[0]: [rank, columns], name + LINEAR[1]: [rows, rank]}
    return {name + EMBEDDING[0]: [rank, rows], name + EMBEDDING[1]: [columns, rank]}


def merged(name: str, weight: Tensor, adapters: Mapping[str, Tensor], scale: float) -> Tensor:
    """The weight with its adapter, if it has one, added in at least float32."""
    layer, wide = name.removesuffix(".weight"), torch.promote_types(weight.dtype, torch.float32)
    for ends in (LINEAR, EMBEDDING):
        if layer + ends[0] in adapters:
            first, second = (adapters[layer + end].to(wide) for end in ends)
            change = scale * (second @ first)
            change = change if ends is LINEAR else change.t()
            return (weight.to(wide) + change).to(weight.dtype)
    return weight


def _write(name: str, parameter: Tensor, whole: Tensor) -> None:
    """Writes the part that this rank holds."""
    rows = rows_held(name, parameter, 0) if isinstance(parameter, DTensor) else None
    local_part(parameter).copy_(whole if rows is None else whole[rows[0] : rows[1]])


def peft_names(adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices by the names that PEFT and engines know them by."""
    return {f"{PEFT_PREFIX}{name}": matrix for name, matrix in adapters.items()}
