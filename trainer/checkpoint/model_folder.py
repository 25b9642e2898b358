"""Writes a Hugging Face model directory: what exports of a policy and of a checkpoint share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from umbra.runtime.disk import check_free_space
from umbra.trainer.run_files import replacing_folder, writing

MAX_SHARD_NBYTES: Final = 5 * 10**9
"""Of a file of weights. Larger ones take more memory in an export of a checkpoint; with smaller
ones, large models have very many."""
# Copied from the directory that the model came from; training does not change them.
_COPIED: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "*.py",
)


@contextmanager
def model_folder(target: Path, source: Path, needed_nbytes: int) -> Generator[Path]:
    """An empty folder for config and weights, which replaces `target` when the block ends. The
    tokenizer is copied from `source`.

    Raises:
        RunDirectoryError: disk full, read-only or the like.
    """
    with writing("export the model to", target, needed_nbytes), replacing_folder(target) as folder:
        check_free_space(folder, needed_nbytes)
        yield folder
        copy_files(source, folder, _COPIED)


def copy_files(source: Path, folder: Path, patterns: Iterable[str]) -> None:
    """Copies the files of `source` with these names."""
    for pattern in patterns:
        for path in source.glob(pattern):
            shutil.copy2(path, folder / path.name)


def correct_config(
    path: Path, dtype: torch.dtype, changes: Mapping[str, Any] | None = None
) -> None:
    """Corrects the dtype and other entries in a config.json, which are those of another copy of the
    model."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    for key, value in (changes or {}).items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_shards(
    folder: Path,
    sizes: Mapping[str, int],
    read: Callable[[str], Tensor],
    max_nbytes: int = MAX_SHARD_NBYTES,
) -> None:
    """Writes tensors as safetensors, with an index if there are several files.

    Args:
        sizes: bytes of each tensor, by name.
        read: returns the tensor of a name. One file's tensors are in memory at a time.
        max_nbytes: of a file; a larger tensor has a file of its own.
    """
    shards = _split(sizes, max_nbytes)
    files: dict[str, str] = {}
    for idx, names in enumerate(shards, 1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{idx:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: read(name) for name in names}, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index: dict[str, Any] = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": files,
        }
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _split(sizes: Mapping[str, int], max_nbytes: int) -> list[list[str]]:
    """The names of each file, in order."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if shards[-1] and filled + nbytes > max_nbytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    return shards
