"""Reads data sets: JSON (one object per line, or one list of objects) or Parquet."""

from __future__ import annotations

import datetime
import importlib
import json
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, cast
from uuid import UUID

from umbra.runtime.disk import similar_path
from umbra.runtime.errors import DataError, how_to_install
from umbra.runtime.rollout.prompts import TOO_DEEP, row_problem

_PARQUET_SUFFIXES: Final = (".parquet", ".pq")
_JSON_SUFFIXES: Final = (".jsonl", ".json", ".ndjson")
_LIST: Final = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*([{\]]|$)")
SUFFIXES: Final = _JSON_SUFFIXES + _PARQUET_SUFFIXES
_BATCH_NUM_ROWS: Final = 1024
"""Rows of Parquet read at a time. Many more delay the first row, few make the others slower."""


def check_data_file(path: Path, key: str) -> None:
    """Raises DataError, with the config key, unless `path` looks like a data set."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{key}: no file {path.absolute()}{similar_path(path)}; paths are taken from the "
            "current folder"
        ) from None
    except OSError as error:
        raise DataError(f"{key}: {path.absolute()} cannot be read: {error.strerror}") from error
    if stat.S_ISDIR(status.st_mode):
        raise DataError(f"{key}: {path} is a folder; give one JSON or Parquet file")
    if path.suffix not in SUFFIXES:
        known = ", ".join(SUFFIXES)
        raise DataError(f"{key}: {path} ends in {path.suffix!r}; known formats end in {known}")
    if status.st_size == 0:
        raise DataError(f"{key}: {path} is empty; it needs at least one prompt")


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (location, row) for each row of a data set; skips empty lines. Raises DataError, with
    the line, for a file that is unreadable or not of its suffix's format, or a row that cannot be
    written to a prompt file."""
    read = _read_parquet if path.suffix in _PARQUET_SUFFIXES else _read_json
    try:
        for where, row in read(path):
            if problem := row_problem(row):
                raise DataError(f"{where}: {problem}")
            yield where, row
    except OSError as error:
        raise DataError(f"data set {path} cannot be read: {error.strerror or error}") from error


def _read_json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reads an object a line, or at once a file that is one list of objects."""
    with path.open("rb") as file:
        is_list = _LIST.match(next(filter(bytes.strip, file), b"")) is not None
        file.seek(0)
        for number, part in enumerate([file.read()] if is_list else file, 1):
            if not part.strip():
                continue
            where = str(path) if is_list else f"{path}, line {number}"
            try:
                found = _parse(part)
            except (DataError, ValueError) as error:
                raise DataError(f"{where}: {error}") from None
            for idx, row in enumerate(cast("list[object]", found if is_list else [found]), 1):
                where = f"{path}, row {idx}" if is_list else where
                if not isinstance(row, dict):
                    kind = type(row).__name__
                    raise DataError(f"{where}: a {kind}, not an object of columns")
                yield where, cast("dict[str, Any]", row)


def _parse(part: bytes) -> Any:
    """Raises ValueError, with the remedy, unless it is JSON."""
    try:
        return json.loads(part.decode("utf-8-sig"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 text (byte 0x{error.object[error.start]:02x} at byte {error.start + 1}): "
            "convert the file to UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, " * (error.lineno > 1) + f"character {error.colno}"
        raise ValueError(
            f"not JSON ({error.msg.removesuffix(' at')} at {place}); a file has one object a line, "
            "or is one list of objects"
        ) from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError:  # Python's limit on digits, whose parsing time is quadratic
        raise ValueError(
            f"an integer has more than {sys.get_int_max_str_digits()} digits: write it as text"
        ) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise DataError(_repeated([name for name, _ in pairs]))
    return found


def _repeated(names: Sequence[str]) -> str:
    """The problem of names that are not unique: a dictionary would keep the last value alone."""
    ((name, count),) = Counter(names).most_common(1)
    return f"{count} values are named {name!r:.200}: keep one of them"


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(
            f"{path}: reading Parquet needs pyarrow: {how_to_install('train')}"
        ) from None
    number = 0
    try:
        file = parquet.ParquetFile(path)
        schema = file.schema_arrow
        if len(set(schema.names)) < len(schema.names):
            raise DataError(f"{path}: {_repeated(schema.names)}")
        with_json = [(field.name, field.type) for field in schema if _has_json(field.type)]
        for batch in file.iter_batches(_BATCH_NUM_ROWS):
            for row in _python_rows(batch, path, number):
                number += 1
                plain = {name: _plain(value) for name, value in row.items()}
                try:
                    plain |= {name: _parsed(plain[name], kind) for name, kind in with_json}
                except (DataError, ValueError) as error:
                    raise DataError(f"{path}, row {number}: JSON in a column: {error}") from None
                yield f"{path}, row {number}", plain
    except (arrow.ArrowException, ValueError) as error:
        raise DataError(f"{path}: not a usable Parquet file: {error}") from None


def _has_json(kind: Any) -> bool:
    """Whether a column's type has a part of Arrow's type for JSON, in which the library `datasets`
    writes objects of several schemas, such as tools and their calls."""
    parts = (kind.field(idx).type for idx in range(kind.num_fields))
    return getattr(kind, "extension_name", "") == "arrow.json" or any(map(_has_json, parts))


def _parsed(value: Any, kind: Any) -> Any:
    """A plain value of an Arrow type, in which JSON is what it stands for and not text."""
    match value:
        case dict():
            fields = cast("dict[str, Any]", value).items()
            of_map = getattr(kind, "item_type", None)
            return {key: _parsed(part, of_map or kind.field(key).type) for key, part in fields}
        case list():
            return [_parsed(part, kind.value_type) for part in cast("list[Any]", value)]
        case str() if _has_json(kind):
            return json.loads(value, object_pairs_hook=_object)
        case _:
            return value


def _plain(value: Any) -> Any:
    """A value as JSON would have it, where it can; bytes stay. Nulls in structs are left out: a
    schema gives each struct of a column the fields of all."""
    match value:
        case dict():
            fields = cast("dict[Any, Any]", value).items()
            return {key: _plain(part) for key, part in fields if part is not None}
        case list() | tuple():
            return [_plain(part) for part in cast("Sequence[Any]", value)]
        case datetime.date() | datetime.time():  # a datetime is a date, and pandas' Timestamp, too
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case Decimal() | UUID():
            return str(value)
        case _:
            return value


def _python_rows(batch: Any, path: Path, num_before: int) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="lossy")
        return rows
    except (ValueError, OverflowError):  # a date beyond Python's, nanoseconds, broken UTF-8
        if (texts := _with_times_as_text(batch)) is not None:
            return _python_rows(texts, path, num_before)
        for idx in range(batch.num_rows):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    column[idx].as_py()
                except (ValueError, OverflowError) as error:
                    raise DataError(
                        f"{path}, row {num_before + idx + 1}: column {name!r} cannot be read "
                        f"({error}): convert it to text or a number"
                    ) from None
        raise


def _with_times_as_text(batch: Any) -> Any:
    """The batch with columns of times as text; None if it has no such columns."""
    arrow: Any = importlib.import_module("pyarrow")
    is_time = [arrow.types.is_temporal(column.type) for column in batch.columns]
    if not any(is_time):
        return None
    columns = [
        column.cast(arrow.string()) if time else column
        for column, time in zip(batch.columns, is_time, strict=True)
    ]
    return arrow.RecordBatch.from_arrays(columns, names=batch.schema.names)
