"""LoRA: frozen layers with a trained product of two small matrices; Hu et al. 2021,
arXiv:2106.09685. Names, start values and scales are those of PEFT.

PEFT itself would rename the layers' own weights, by which they are read, sharded, published and
exported, and would add dropout and a table of adapters to each forward pass.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        self.lora_A, self.lora_B = _pair(base.weight, rank, dtype)  # [R, I] and [O, R]
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

    def start(self, name: str, generator: torch.Generator) -> None:
        _start(self, name, generator)


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


class LoraExperts(nn.Module):
    """Takes the place of the experts of a layer, whose weights are stacks of matrices. As in PEFT,
    the matrices of all experts are side by side, and those of gate and up in `base_layer`.

    T: tokens, K: experts of a token, S: T K pairs of both, by expert; N: experts, I: inputs,
    O: outputs, R: rank.
    """

    def __init__(self, base: Any, rank: int, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = base.gate_up_proj, base.down_proj  # [N, O, I]
        base.gate_up_proj = base.down_proj = None
        self._activate = base._apply_gate
        self.base_layer = nn.Module()
        self.base_layer.lora_A, self.base_layer.lora_B = _pair(self.gate_up_proj, rank, dtype)
        self.lora_A, self.lora_B = _pair(self.down_proj, rank, dtype)  # [N R, I] and [O, R N]
        self.scale = scale
        self.is_adapted = True

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, I] of [T, I] hidden states, with [T, K] experts and their weights."""
        chosen, order = top_k_index.flatten().sort(stable=True)
        experts = torch.arange(len(self.down_proj), device=hidden.device)
        ends = torch.searchsorted(chosen, experts, right=True)
        inputs = hidden[order // top_k_index.shape[1]]  # [S, I]
        inner = self._activate(self._product(inputs, self.gate_up_proj, self.base_layer, ends))
        output = self._product(inner, self.down_proj, self, ends)
        output = (output * top_k_weights.flatten()[order, None])[order.argsort()]
        return output.view(*top_k_index.shape, -1).sum(1).to(hidden.dtype)

    def _product(self, inputs: Tensor, weight: Tensor, pair: Any, ends: Tensor) -> Tensor:
        output = _grouped(inputs, weight, ends)
        if not self.is_adapted:
            return output
        first, second = _by_expert(pair.lora_A.weight, pair.lora_B.weight, len(weight))
        return output + self.scale * _grouped(_grouped(inputs, first, ends), second, ends)

    def start(self, name: str, generator: torch.Generator) -> None:
        _start(self.base_layer, name, generator)
        _start(self, name, generator)


def _pair(weight: Tensor, rank: int, dtype: torch.dtype) -> tuple[nn.Linear, nn.Linear]:
    """The two matrices of each matrix in a weight, side by side."""
    *stack, num_out, num_in = weight.shape
    rank *= math.prod(stack)
    return (
        nn.Linear(num_in, rank, bias=False, device=weight.device, dtype=dtype),
        nn.Linear(rank, num_out, bias=False, device=weight.device, dtype=dtype),
    )


@torch.no_grad()
def _start(pair: Any, name: str, generator: torch.Generator) -> None:
    first, second = pair.lora_A.weight, pair.lora_B.weight
    bound = first.shape[1] ** -0.5
    whole = torch.empty(first.shape, dtype=torch.float64)
    _write(name, first, whole.uniform_(-bound, bound, generator=generator))
    local_part(second).zero_()


def _by_expert(first: Tensor, second: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """[N, R, I] and [N, O, R]. PEFT has the rows of A by expert, and the columns of B by rank."""
    by_rank = second.view(len(second), -1, num_experts)
    return first.view(num_experts, -1, first.shape[1]), by_rank.permute(2, 0, 1).contiguous()


def _grouped(inputs: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[S, O] of [S, I] and [N, O, I]; the rows of expert n end before `ends[n]`, [N]."""
    if inputs.dtype != torch.float64:  # which torch's product lacks
        return F.grouped_mm(inputs, weights.mT, offs=ends.int())
    parts = inputs.tensor_split(ends[:-1].cpu())
    return torch.cat([F.linear(part, each) for part, each in zip(parts, weights, strict=True)])


class LoraAdapters:
    """The adapters of a model, and its only parameters with gradients. Must be made before the
    model is sharded."""

    def __init__(self, model: nn.Module, section: LoraSection, dtype: torch.dtype) -> None:
        """Raises ConfigError if a target matches no layer."""
        self.scale = section.scale
        spec = LoraSpec(rank=section.rank, alpha=section.scale * section.rank)
        self.spec = None if section.merge else spec  # as engines get them
        model.requires_grad_(False)
        self._layers: dict[str, LoraLinear | LoraEmbedding | LoraExperts] = {}
        kinds: Any = {nn.Linear: LoraLinear, nn.Embedding: LoraEmbedding}
        for name, base in adapted_layers(model, section).items():
            make = kinds.get(type(base), LoraExperts)
            layer = make(base, section.rank, section.scale, dtype)
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


def adapted_layers(model: nn.Module, section: LoraSection) -> dict[str, nn.Module]:
    """The layers that get an adapter, by name: those of the targets, or all linear ones of decoder
    blocks. Layers of other classes, such as quantised ones, multiply in ways of their own and get
    none. Raises ConfigError if a target matches none, or there are none."""
    any_model: Any = model
    embeddings, head = any_model.get_input_embeddings(), any_model.get_output_embeddings()
    modules: Iterable[tuple[str, nn.Module]] = any_model.named_modules()
    layers = {
        name: module
        for name, module in modules
        if type(module) is nn.Linear
        or (module is embeddings and type(module) is nn.Embedding)
        or _are_experts(module)
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


def _are_experts(module: Any) -> bool:
    """Whether they compute as `LoraExperts` does, by the attributes that transformers sets. Older
    versions lack some, where all experts compute so."""
    others = ("has_bias", "is_transposed", "has_post_expert_norm")
    is_gated = getattr(module, "has_gate", False) and getattr(module, "is_concatenated", True)
    return is_gated and not any(getattr(module, name, False) for name in others)


def adapter_shapes(name: str, layer: Any, rank: int) -> dict[str, list[int]]:
    """The names and shapes of a layer's matrices."""
    if isinstance(layer, nn.Embedding):
        rows, columns = layer.weight.shape
        return {name + EMBEDDING[0]: [rank, rows], name + EMBEDDING[1]: [columns, rank]}
    weights = {name: layer.weight if isinstance(layer, nn.Linear) else layer.down_proj}
    if not isinstance(layer, nn.Linear):
        weights[f"{name}.base_layer"] = layer.gate_up_proj
    return {
        module + end: list(matrix.weight.shape)
        for module, weight in weights.items()
        for end, matrix in zip(LINEAR, _pair(weight.to("meta"), rank, weight.dtype), strict=True)
    }


def matrices_of(name: str, adapters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """The matrices whose product is added to a parameter, transposed for embeddings; None if it has
    no adapter."""
    module, _, part = name.rpartition(".")
    module += ".base_layer" if part == "gate_up_proj" else ""
    for ends in (LINEAR, EMBEDDING) if part in ("weight", "gate_up_proj", "down_proj") else ():
        if module + ends[0] in adapters:
            first, second = (adapters[module + end] for end in ends)
            return (first, second) if ends is LINEAR else (second.t(), first.t())
    return None


def merged(name: str, weight: Tensor, adapters: Mapping[str, Tensor], scale: float) -> Tensor:
    """This rank's part of a weight with its adapter, if it has one, added in at least float32. The
    matrices are whole."""
    pair = matrices_of(name, adapters)
    if pair is None:
        return weight
    part = local_part(weight)
    total = part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
    first, second = (matrix.to(total.dtype) for matrix in pair)
    rows = _rows_held(name, weight)
    if total.ndim == 3:
        first, second = _by_expert(first, second, len(weight))
        return total.baddbmm_(second[rows], first[rows], alpha=scale).to(part.dtype)
    return total.addmm_(second[rows], first, alpha=scale).to(part.dtype)


def _write(name: str, parameter: Tensor, whole: Tensor) -> None:
    """Writes the part that this rank holds."""
    local_part(parameter).copy_(whole[_rows_held(name, parameter)])


def _rows_held(name: str, parameter: Tensor) -> slice:
    return slice(*(rows_held(name, parameter, 0) or (None,)))


def peft_names(adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices by the names that PEFT and engines know them by."""
    return {f"{PEFT_PREFIX}{name}": matrix for name, matrix in adapters.items()}
