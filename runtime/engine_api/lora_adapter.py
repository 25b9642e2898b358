from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, cast

from umbra.runtime.engine_api.lora_matrices import (
    Shapes,
    check_fits,
    model_shapes,
    module_shapes,
)
from umbra.runtime.engine_api.weight_files import read_header
from umbra.runtime.errors import DataError

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """A LoRA adapter's folder, as PEFT saves it. `rank` is its largest matrices'."""

    name: str
    path: Path
    rank: int

    @classmethod
    def read(cls, name: str, path: Path, model_path: Path) -> Self:
        """Reads the folder, and compares its matrices with the model's. Models that are quantised,
        or whose checkpoint has other names than their modules, are not compared. Raises DataError
        for a folder that is missing, damaged, or for another model."""
        try:
            config = _read_config(path / _CONFIG)
            shapes = {name: each.shape for name, each in read_header(path / _WEIGHTS).items()}
            ranks = _ranks(config, shapes)
            check_fits(shapes, model_shapes(model_path))
        except (DataError, OSError, ValueError) as error:
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


def _ranks(config: Mapping[str, Any], shapes: Shapes) -> set[int]:
    ranks = {rank for _, rank, _ in module_shapes(shapes).values()}
    if not ranks:
        raise ValueError(f"{_WEIGHTS} holds no lora_A and lora_B")
    if not config.get("rank_pattern") and any(rank != config.get("r") for rank in ranks):
        raise ValueError(f"{_CONFIG} has r {config.get('r')!r}, its matrices {sorted(ranks)}")
    return ranks
