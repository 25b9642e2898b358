"""Reads data sets: JSONL (one object a line) or Parquet."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

from umbra.runtime.errors import DataError

_PARQUET_SUFFIXES: Final = (".parquet", ".pq")
_JSONL_SUFFIXES: Final = (".jsonl", ".json", ".ndjson")
_BATCH_NUM_ROWS: Final = 1024
"""Of Parquet, at a time: with many more the first row is late, with few the others take longer."""


def check_data_file(path: Path, key: str) -> None:
    """Raises DataError, naming the config key, unless `path` looks like a data set."""
    if not path.exists():
        raise DataError(
            f"{key}: no file {path.absolute()}; paths are taken from the current folder"
        )
    if path.is_dir():
        raise DataError(f"{key}: {path} is a folder; give one JSONL or Parquet file")
    if path.suffix not in _PARQUET_SUFFIXES + _JSONL_SUFFIXES:
        known = ", ".join(_JSONL_SUFFIXES + _PARQUET_SUFFIXES)
        raise DataError(f"{key}: {path} ends in {path.suffix!r}; known formats end in {known}")
    if path.stat().st_size == 0:
        raise DataError(f"{key}: {path} is empty; it needs at least one prompt")


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (where it stands, row) for each row of a data set; empty lines are skipped.

    Raises:
        DataError: unreadable, or not what its name says; names the line.
    """
    read = _read_parquet if path.suffix in _PARQUET_SUFFIXES else _read_jsonl
    try:
        yield from read(path)
    except OSError as error:
        raise DataError(f"data set {path} cannot be read: {error.strerror or error}") from error


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(
                    f"{where}: not JSON ({error}); a .jsonl file has one object a line"
                ) from None
            if not isinstance(row, dict):
                raise DataError(f"{where}: a {type(row).__name__}, not an object of columns")
            yield where, cast("dict[str, Any]", row)


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(
            f"{path}: reading Parquet needs pyarrow: pip install 'umbra-rl[train]'"
        ) from None
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(_BATCH_NUM_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except arrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a usable Parquet file: {error}") from None
