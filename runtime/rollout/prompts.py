"""Prompts of a data set, tokenized, in one file.

A prompt file is a stream of msgpack maps {"id": str, "prompt": str, "tokens": bytes (int32,
little endian), "row": map of the data set's columns}, and "teacher": list of parts like "tokens",
if a teacher has prompts of its own. It is written once and read by offset, so that a large data
set costs address space, not memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from umbra.runtime.disk import replacing
from umbra.runtime.errors import DataError

TOO_DEEP: Final = (
    "nested deeper than can be read (about 1000 levels): flatten it, or write a part of it as text"
)
_MESSAGE_DEPTH: Final = 16
"""Levels that the message to a rollout worker adds around a row. Fewer could accept rows that
cannot be sent; more would refuse rows that can."""
_FIELDS: Final = {"id", "prompt", "tokens", "row"}


@dataclass(frozen=True, slots=True)
class Prompt:
    prompt_id: str  # unique in its file
    text: str  # the text that was tokenized
    tokens: NDArray[np.int32]  # [P] int32
    row: dict[str, Any]  # the data set's columns, for the reward function and agent loops
    # A teacher's prompt, if it has its own. Between two parts comes a successful completion.
    teacher: Sequence[NDArray[np.int32]] = ()

    def to_score(self) -> dict[str, Any]:
        """Text and packed row. Each completion gets its own row, since a reward may change it."""
        return {"text": self.text, "row": msgpack.packb(self.row)}


def to_row(packed: bytes) -> dict[str, Any]:
    row: dict[str, Any] = msgpack.unpackb(packed, strict_map_key=False)
    return row


def write_prompts(path: str | os.PathLike[str], records: Iterable[Mapping[str, Any]]) -> int:
    """Writes a prompt file, durably and all or nothing; returns the number of prompts.
    Raises DataError if there are no prompts, one is empty, an id occurs twice, or a value
    cannot be encoded."""
    target = Path(path)
    seen: set[str] = set()
    with replacing(target) as file:
        for record in records:
            if record["id"] in seen:
                raise DataError(f"prompt id {record['id']!r} occurs twice; ids are unique")
            seen.add(record["id"])
            file.write(_encode(record))
        if not seen:
            raise DataError(f"{target}: a data set without prompts")
    return len(seen)


def _encode(record: Mapping[str, Any]) -> bytes:
    if set(record) - {"teacher"} != _FIELDS:
        raise DataError(f"a prompt record has {sorted(_FIELDS)}, not {sorted(record)}")
    if len(record["tokens"]) == 0:
        raise DataError(f"prompt {record['id']!r} is empty: give it at least one token")
    content = dict(record)
    problem = row_problem(content["row"]) or row_problem(content)
    if problem:
        raise DataError(f"prompt {record['id']!r}: {problem}")
    return msgpack.packb(content)


def row_problem(row: Mapping[str, Any]) -> str:
    """The first column that cannot be encoded, why, and the remedy; "" if all can."""
    if not _problem(row):
        return ""
    problems = ((name, _problem({name: value})) for name, value in row.items())
    return next(f"column {name!r:.200} {problem}" for name, problem in problems if problem)


def _problem(value: object) -> str:
    for _ in range(_MESSAGE_DEPTH):
        value = [value]
    try:
        msgpack.packb(value)
    except UnicodeEncodeError as error:
        return (
            f"holds a lone surrogate ({error.object[error.start]!r} at character "
            f"{error.start + 1}), half of a character, which no file can hold: remove it, or write "
            "both halves"
        )
    except OverflowError:
        return "holds an integer beyond 64 bits (-2**63 to 2**64 - 1): write it as text"
    except ValueError:
        return f"is {TOO_DEEP}"
    except TypeError as error:
        return f"cannot be encoded ({error}): convert it to text, numbers, lists and maps"
    return ""


class PromptSet:
    """Prompts of one file, by index. Owns a read-only mapping of the file. `open` and access raise
    DataError if the file is missing, damaged, or has no prompts."""

    def __init__(self, path: Path, data: mmap.mmap, offsets: NDArray[np.int64]) -> None:
        self.path = path
        self._data = data
        self._offsets = offsets  # [num_prompts + 1]
        self._idx_by_id: dict[str, int] = {}
        self._unread = iter(range(len(self)))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> PromptSet:
        target = Path(path)
        try:
            with target.open("rb") as file:
                if target.stat().st_size == 0:
                    raise DataError(f"{target}: no prompts in it")
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DataError(f"prompt file {target} cannot be read: {error.strerror}") from error
        return cls(target, data, _record_offsets(target, data))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, idx: int) -> Prompt:
        start, stop = int(self._offsets[idx]), int(self._offsets[idx + 1])
        record: Mapping[str, Any] = msgpack.unpackb(self._data[start:stop], strict_map_key=False)
        if not isinstance(record, dict) or not record.keys() >= _FIELDS:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(f"{self.path}: record {idx} is not a prompt")
        teacher = [_tokens(part) for part in record.get("teacher", ())]
        return Prompt(
            record["id"], record["prompt"], _tokens(record["tokens"]), record["row"], teacher
        )

    def find(self, prompt_id: str) -> Prompt | None:
        """Reads the file as far as needed, once."""
        while prompt_id not in self._idx_by_id and (idx := next(self._unread, None)) is not None:
            self._idx_by_id[self[idx].prompt_id] = idx
        found = self._idx_by_id.get(prompt_id)
        return None if found is None else self[found]

    def close(self) -> None:
        self._data.close()


def _tokens(packed: bytes) -> NDArray[np.int32]:
    return np.frombuffer(packed, "<i4").astype(np.int32)


def _record_offsets(path: Path, data: mmap.mmap) -> NDArray[np.int64]:
    with path.open("rb") as file:
        unpacker = msgpack.Unpacker(file, max_buffer_size=0)
        offsets = [0]
        try:
            while True:
                unpacker.skip()
                offsets.append(unpacker.tell())
        except msgpack.OutOfData:
            pass
        except ValueError as error:
            raise DataError(f"{path}: damaged after record {len(offsets) - 1}: {error}") from error
    if offsets[-1] != len(data):
        raise DataError(f"{path}: damaged after record {len(offsets) - 1}: write it again")
    return np.asarray(offsets, np.int64)
