"""Reads a LoRA adapter's folder as PEFT saves it, and checks it against the model before a
start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, cast

from umbra.runtime.errors import DataError

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_MAX_HEADER_NBYTES: Final = 100 << 20  # safetensors' own limit

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """The facts about an adapter that do not need its weights.

    Attributes:
        rank: of its largest matrices.
    """

    name: str
    path: Path
    rank: int

    @classmethod
    def read(cls, name: str, path: Path, model_path: Path) -> Self:
        """Reads the folder, and checks whether its matrices fit those of the model.

        Models that are quantised, or whose checkpoint has other names than their modules, are not
        compared.

        Raises:
            DataError: the folder is missing, holds no LoRA adapter, is damaged, or is for another
                model.
        """
        try:
            config = _read_config(path / _CONFIG)
            shapes = _read_shapes(path / _WEIGHTS)
            ranks = _ranks(config, shapes)
            _check_fits(shapes, _model_shapes(model_path))
        except (OSError, ValueError) as error:
            raise DataError(
                f"LoRA adapter {name!r}: {path} cannot be used: {error} (expected a folder as "
                "PEFT's save_pretrained writes it)"
            ) from error
        return cls(name=name, path=path, rank=max(ranks))


def _read_config(path: Path) -> Mapping[str, Any]:
    raw: Any = json.loads(path.read_text())
    if not isinstance(raw, dict):
        raise ValueError(f"{path.name} does not hold a JSON object")
    config = cast("dict[str, Any]", raw)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path.name} has peft_type {config.get('peft_type')!r}, not 'LORA'")
    return config


def _read_shapes(path: Path) -> Shapes:
    """Shapes of a safetensors file's tensors, by name."""
    with path.open("rb") as file:
        nbytes = int.from_bytes(file.read(8), "little")
        if nbytes > _MAX_HEADER_NBYTES:
            raise ValueError(f"{path.name} is no safetensors file")
        header: Any = json.loads(file.read(nbytes))
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} is no safetensors file")
    shapes: dict[str, tuple[int, ...]] = {}
    for name, entry in cast("dict[str, Any]", header).items():
        match name, entry:
            case "__metadata__", _:
                pass
            case _, {"shape": [*shape]} if all(isinstance(size, int) for size in shape):
                shapes[name] = tuple(shape)
            case _:
                raise ValueError(f"{path.name} is no safetensors file: {name} has no shape")
    return shapes


def _ranks(config: Mapping[str, Any], shapes: Shapes) -> set[int]:
    """Ranks of the matrices; checks that each has both its factors."""
    ranks: set[int] = set()
    for name, shape in shapes.items():
        if ".lora_A." not in name:
            continue
        other = shapes.get(name.replace(".lora_A.", ".lora_B."), ())
        if len(shape) != 2 or len(other) != 2 or shape[0] != other[1]:
            raise ValueError(f"{name} has shape {shape}, and its lora_B {other or 'is not there'}")
        ranks.add(shape[0])
    if not ranks:
        raise ValueError(f"{_WEIGHTS} holds no lora_A and lora_B")
    if not config.get("rank_pattern") and any(rank != config.get("r") for rank in ranks):
        raise ValueError(f"{_CONFIG} has r {config.get('r')!r}, its matrices {sorted(ranks)}")
    return ranks


def _model_shapes(model_path: Path) -> Shapes:
    config: Any = json.loads((model_path / "config.json").read_text())
    if "quantization_config" in config:  # it may be packed
        return {}
    return {
        name: shape
        for path in sorted(model_path.glob("*.safetensors"))
        for name, shape in _read_shapes(path).items()
    }


def _check_fits(shapes: Shapes, model: Shapes) -> None:
    """Raises ValueError for a matrix that the model does not have, or has in another shape."""
    modules = {
        name.removeprefix(_PREFIX).partition(".lora_A.")[0]: (
            shapes[name.replace(".lora_A.", ".lora_B.")][0],
            shape[1],
        )
        for name, shape in shapes.items()
        if ".lora_A." in name
    }
    found = {name: model[f"{name}.weight"] for name in modules if f"{name}.weight" in model}
    if not found:
        return
    for name, shape in modules.items():
        if name == "lm_head":  # tied weights are not in the checkpoint
            continue
        if name not in found:
            raise ValueError(f"the model has no {name}, so the adapter is for another one")
        if found[name] != shape:
            raise ValueError(
                f"{name} is {found[name]} in the model and {shape} in the adapter, which is of "
                "another one"
            )
