from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from umbra.engines.embedded.parameters import Parameters
from umbra.runtime.engine_api.weight_files import WeightFiles
from umbra.runtime.errors import ConfigError, DataError

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_READABLE: Final = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_IGNORED_SUFFIXES: Final = (".rotary_emb.inv_freq",)  # buffers that old checkpoints carry


def parse_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported; allowed: {', '.join(DTYPES)}")
    return DTYPES[name]


def load_checkpoint(model_path: str, parameters: Parameters) -> None:
    """Fills all parameters from safetensors files, converting to their dtype. Raises DataError for
    files or tensors that are missing, unexpected, mis-shaped or unusable."""
    missing = set(parameters.destinations)
    with ExitStack() as stack:
        for name, tensor, file in _tensors(model_path, stack):
            if name.endswith(_IGNORED_SUFFIXES):
                continue
            own_name = parameters.aliases.get(name, name)
            target = parameters.destinations.get(own_name)
            if target is None:
                raise DataError(
                    f"{file} holds {name!r}, which this architecture does not have; config.json "
                    "and the weights are from different models"
                )
            _check(name, tensor, target, file)
            target.copy_(tensor)  # a tied tensor may be there twice, with the same bytes
            missing.discard(own_name)
    if missing:
        names = sorted(missing)
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise DataError(
            f"{model_path} lacks {len(names)} tensors of the architecture in its config.json: "
            f"{shown}"
        )
    parameters.refresh()


def _check(name: str, tensor: Tensor, target: Tensor, file: Path) -> None:
    if tensor.shape != target.shape:
        raise DataError(
            f"{file}: {name!r} has shape {tuple(tensor.shape)}, config.json asks for "
            f"{tuple(target.shape)}"
        )
    if tensor.dtype not in _READABLE:
        raise DataError(
            f"{file}: {name!r} has dtype {tensor.dtype}; allowed: float16, bfloat16, float32, "
            "float64 (quantised checkpoints are not supported)"
        )


def _tensors(model_path: str, stack: ExitStack) -> Iterator[tuple[str, Tensor, Path]]:
    for file in WeightFiles(Path(model_path)).files:
        try:
            reader = cast(Any, stack.enter_context(safe_open(str(file), framework="pt")))
            names: list[str] = list(reader.keys())
            for name in names:
                yield name, cast(Tensor, reader.get_tensor(name)), file
        except (OSError, SafetensorError) as error:
            raise DataError(f"{file} cannot be read: {error}") from error
