"""A LoRA adapter: its folder as PEFT saves it, and its matrices by PEFT's names and shapes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self, cast

from umbra.runtime.engine_api.weight_files import WeightFiles, read_header
from umbra.runtime.errors import ConfigError, DataError, ProtocolError, WeightSyncError, brief

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"

PEFT_PREFIX: Final = "base_model.model."
LINEAR: Final = (".lora_A.weight", ".lora_B.weight")
"""Ends of the names of a linear layer's matrices."""
EMBEDDING: Final = (".lora_embedding_A", ".lora_embedding_B")
"""The same of an embedding's, whose weight is transposed."""

Shapes = Mapping[str, tuple[int, ...]]


def read_adapter_rank(name: str, path: Path, model_path: Path) -> int:
    """The rank of the largest matrices in an adapter's folder, as PEFT saves it.

    Compares the matrices with the model's, unless the model is quantised or its checkpoint has
    other names than its modules. Raises DataError for a folder that is missing, damaged, or for
    another model.
    """
    try:
        config = _read_config(path / _CONFIG)
        shapes = {name: each.shape for name, each in read_header(path / _WEIGHTS).items()}
        ranks = _ranks(config, shapes)
        check_fits(shapes, model_shapes(model_path))
    except (DataError, OSError, ValueError) as error:
        raise DataError(
            f"LoRA adapter {name!r}: {path} cannot be used: {error} (expected a folder as PEFT's "
            "save_pretrained writes it)"
        ) from error
    return max(ranks)


def _read_config(path: Path) -> Mapping[str, Any]:
    raw: Any = json.loads(path.read_text())
    if not isinstance(raw, dict):
        raise ValueError(f"{path.name} does not hold a JSON object")
    config = cast("dict[str, Any]", raw)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path.name} has peft_type {config.get('peft_type')!r}, not 'LORA'")
    return config


def _ranks(config: Mapping[str, Any], shapes: Shapes) -> set[int]:
    ranks = {rank for _, rank, _ in module_shapes(shapes).values()}
    if not ranks:
        raise ValueError(f"{_WEIGHTS} holds no lora_A and lora_B")
    if not config.get("rank_pattern") and any(rank != config.get("r") for rank in ranks):
        raise ValueError(f"{_CONFIG} has r {config.get('r')!r}, its matrices {sorted(ranks)}")
    return ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """A LoRA adapter, whose matrices are the tensors of a sync. The product of two is scaled
    by alpha / rank; for rank-stabilised LoRA, alpha is PEFT's lora_alpha times the square
    root of the rank.

        base_model.model.MODULE.lora_A.weight     [rank, in]
        base_model.model.MODULE.lora_B.weight     [out, rank]
        base_model.model.MODULE.lora_embedding_A  [rank, vocabulary]
        base_model.model.MODULE.lora_embedding_B  [width, rank]

    MODULE's weight becomes W + alpha / rank * lora_B @ lora_A, with embeddings transposed. The
    matrices of a layer's experts are side by side, as in PEFT, whose `base_layer` of `experts` has
    those of gate and up: rows of lora_A are by expert, columns of lora_B by rank.
    """

    rank: int
    alpha: float

    def check(self, shapes: Shapes) -> None:
        """Raises ValueError unless the tensors are only pairs of matrices of this rank."""
        modules = module_shapes(shapes)
        ends = (*LINEAR, *EMBEDDING)
        pairs = {f"{PEFT_PREFIX}{module}{end}" for module in modules for end in ends}
        if others := sorted(shapes.keys() - pairs):
            raise ValueError(
                f"{others[0]!r} is no matrix of a LoRA adapter: they come in pairs, named "
                f"{PEFT_PREFIX}MODULE.lora_A.weight and {PEFT_PREFIX}MODULE.lora_B.weight"
            )
        for module, (_, rank, _) in modules.items():
            if rank % self.rank if is_of_experts(module) else rank != self.rank:
                raise ValueError(
                    f"the matrices of {module} have rank {rank}, and the adapter's rank is "
                    f"{self.rank}"
                )
        if not modules:
            raise ValueError("a LoRA adapter needs at least one pair of matrices")

    def to_wire(self) -> dict[str, Any]:
        return {"rank": self.rank, "alpha": self.alpha}

    @classmethod
    def from_wire(cls, raw: object) -> Self:
        match cast("Any", raw):
            case {"rank": int(rank), "alpha": int() | float() as alpha} if (
                rank > 0 and math.isfinite(alpha)
            ):
                return cls(rank=rank, alpha=alpha)
            case _:
                raise ProtocolError(f"a LoRA adapter has a rank and an alpha, got {brief(raw)}")


class LoraBase:
    """A model whose weights stay while syncs bring LoRA adapters of at most `max_rank`."""

    def __init__(self, model_path: Path, max_rank: int) -> None:
        self._model_path = model_path
        self._max_rank = max_rank

    def check(self, adapter: LoraSpec | None, shapes: Shapes) -> None:
        """Raises WeightSyncError for the model's own weights, or an adapter that does not fit."""
        if adapter is None:
            raise WeightSyncError(
                "the sync brings weights of the model, and the engine was started for LoRA "
                f"adapters: leave lora_rank = {self._max_rank} out of its arguments, or publish "
                "an adapter"
            )
        if adapter.rank > self._max_rank:
            raise WeightSyncError(
                f"the LoRA adapter has rank {adapter.rank}, and the engine was started with "
                f"lora_rank = {self._max_rank}: raise that"
            )
        try:
            check_fits(shapes, self._model_shapes)
        except ValueError as error:
            raise WeightSyncError(f"the LoRA adapter does not fit the model: {error}") from None

    @cached_property
    def _model_shapes(self) -> Shapes:
        return model_shapes(self._model_path)


def check_lora_rank(lora_rank: int, *, load_weights: bool) -> None:
    if lora_rank < 0:
        raise ConfigError(f"lora_rank must be at least 0, got {lora_rank}")
    if lora_rank and load_weights:
        raise ConfigError(
            f"lora_rank = {lora_rank} and load_weights exclude each other: an engine waits for the "
            "adapter of the first sync, or serves the weights of its folder: leave one of them out"
        )


def module_shapes(shapes: Shapes) -> dict[str, tuple[int, int, int]]:
    """(rows, rank, columns) of each module's weight and pair of matrices. Raises ValueError for a
    lora_A whose lora_B is missing, or has other shapes."""
    modules: dict[str, tuple[int, int, int]] = {}
    for name, first in shapes.items():
        ends = next((ends for ends in (LINEAR, EMBEDDING) if name.endswith(ends[0])), None)
        if ends is None:
            continue
        module = name.removesuffix(ends[0])
        second = shapes.get(module + ends[1], ())
        if len(first) != 2 or len(second) != 2 or first[0] != second[1]:
            raise ValueError(f"{name} has shape {first}, and its lora_B {second or 'is not there'}")
        rows, columns = (second[0], first[1]) if ends is LINEAR else (first[1], second[0])
        modules[module.removeprefix(PEFT_PREFIX)] = rows, first[0], columns
    return modules


def check_fits(shapes: Shapes, model: Shapes) -> None:
    """Raises ValueError for a matrix that the model lacks, or has in another shape. Models whose
    checkpoint has other names than their modules are not compared."""
    modules = module_shapes(shapes)
    modules = {name: each for name, each in modules.items() if not is_of_experts(name)}
    found = {name: model[f"{name}.weight"] for name in modules if f"{name}.weight" in model}
    if not found:
        return
    for name, (rows, _, columns) in modules.items():
        if name == "lm_head":  # tied weights are not in the checkpoint
            continue
        if name not in found:
            raise ValueError(f"the model has no {name}, so the adapter is for another one")
        if found[name] != (rows, columns):
            raise ValueError(
                f"{name} is {found[name]} in the model and {(rows, columns)} in the adapter, "
                "which is of another one"
            )


def model_shapes(model_path: Path) -> Shapes:
    """Shapes of a model's weights; empty if they are quantised, or not in the folder."""
    config: Any = json.loads((model_path / "config.json").read_text())
    if "quantization_config" in config:
        return {}
    try:
        return {name: each.shape for name, each in WeightFiles(model_path).tensors.items()}
    except DataError:
        return {}


def matrix_shapes(model_path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of layers whose weight is a matrix, by name; as `model_shapes`. Experts have one
    each, also where they are stacked in the files."""
    found: dict[str, tuple[int, ...]] = {}
    for name, (*stack, rows, columns) in (
        (name, shape) for name, shape in model_shapes(model_path).items() if len(shape) > 1
    ):
        if not stack and name.endswith(".weight"):
            found[name.removesuffix(".weight")] = rows, columns
        elif is_of_experts(name) and len(stack) == 1:
            found |= {f"{name}.{number}": (rows, columns) for number in range(stack[0])}
    return found


def is_of_experts(name: str) -> bool:
    """Whether it names experts of a layer, or a part of them."""
    return ".experts." in f".{name}."


def is_in_block(name: str) -> bool:
    """Whether it names a part of a decoder block, which are numbered."""
    return re.search(r"\.\d+\.", name) is not None
