"""The columnar batch of tokens that an engine streams once per tick.

S: runs, N: tokens in them, F: finished requests. An example of two runs and one finish:

    ids [7, 9]  positions [0, 4]  offsets [0, 2, 5]  versions [3, 3]
    tokens [11, 12, 21, 22, 23]  logprobs [...]  finished_ids [9]  finish_reasons ["stop"]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypedDict, cast

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from umbra.runtime.errors import ProtocolError, brief

_DTYPES: Final = {
    "ids": np.int64,
    "positions": np.int32,
    "offsets": np.int32,
    "tokens": np.int32,
    "logprobs": np.float32,
    "versions": np.int64,
    "finished_ids": np.int64,
}

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

END_TICK_S: Final = 0.005
"""Requests that end within this time share a batch, as many with the same budget do."""


@dataclass(frozen=True, slots=True)
class DeltaBatch:
    """One checked batch.

    Attributes:
        ids, positions, versions: [S] request id, completion offset of the first token, version.
        bounds: [S + 1] offsets into tokens.
        tokens, logprobs: [N] int32, [N] float32.
        finishes: (request id, reason) of the F finished requests.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    bounds: NDArray[np.int64]
    versions: NDArray[np.int64]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finishes: list[tuple[int, str]]

    @classmethod
    def from_wire(cls, item: object) -> DeltaBatch:
        """Raises ProtocolError for columns that do not fit together."""
        if not isinstance(item, Mapping):
            raise ProtocolError(f"a delta batch must be a map, got {brief(item)}")
        fields = cast("Mapping[str, Any]", item)
        columns: dict[str, NDArray[Any]] = {}
        for name, dtype in _DTYPES.items():
            column = fields.get(name)
            if not isinstance(column, np.ndarray):
                raise ProtocolError(f"delta column {name} is missing or not an array")
            array = cast(NDArray[Any], column)
            if array.dtype != dtype or array.ndim != 1:
                raise ProtocolError(f"delta column {name} must be 1-d {np.dtype(dtype)}")
            columns[name] = array
        reasons: list[Any] | None = fields.get("finish_reasons")
        if not isinstance(reasons, list) or not all(isinstance(text, str) for text in reasons):
            raise ProtocolError("delta column finish_reasons must be a list of texts")
        _check_lengths(columns, len(reasons))
        return cls(
            ids=columns["ids"],
            positions=columns["positions"].astype(np.int64),
            bounds=columns["offsets"].astype(np.int64),
            versions=columns["versions"],
            tokens=columns["tokens"],
            logprobs=columns["logprobs"],
            finishes=list(zip(columns["finished_ids"].tolist(), reasons, strict=True)),
        )

    def select(self, mask: NDArray[np.bool_]) -> DeltaBatch:
        """The runs of `mask` [S], without any finishes."""
        counts = np.diff(self.bounds)
        bounds = np.zeros(int(np.count_nonzero(mask)) + 1, np.int64)
        np.cumsum(counts[mask], out=bounds[1:])
        tokens = np.repeat(mask, counts)
        return DeltaBatch(
            ids=self.ids[mask],
            positions=self.positions[mask],
            bounds=bounds,
            versions=self.versions[mask],
            tokens=self.tokens[tokens],
            logprobs=self.logprobs[tokens],
            finishes=[],
        )


def _check_lengths(columns: dict[str, NDArray[Any]], num_reasons: int) -> None:
    num_runs, num_tokens = len(columns["ids"]), len(columns["tokens"])
    lengths = {
        "positions": num_runs,
        "versions": num_runs,
        "offsets": num_runs + 1,
        "logprobs": num_tokens,
        "finished_ids": num_reasons,
    }
    for name, length in lengths.items():
        if len(columns[name]) != length:
            raise ProtocolError(f"delta column {name}: {len(columns[name])} values, not {length}")
    offsets = columns["offsets"].astype(np.int64)  # differences of 32-bit integers may overflow
    if offsets[0] != 0 or offsets[-1] != num_tokens or bool((np.diff(offsets) < 0).any()):
        raise ProtocolError(
            f"delta offsets {brief(offsets.tolist())} do not cut {num_tokens} tokens"
        )
    if bool((columns["versions"] < 0).any()):
        raise ProtocolError("a delta of tokens with a negative version")
    if not bool(np.isfinite(columns["logprobs"]).all()):
        raise ProtocolError("a delta with logprobs that are not finite")


class DeltaColumns(TypedDict):
    """One wire batch. A finish comes with, or after, the request's last run, never before.

    If an engine reports the end of a request, the batch does not wait for the tick, because a tool
    or the next turn depends on it. A run is a stretch of one request's tokens made under one
    version. S: runs in a batch, N: tokens in a batch, F: requests finished in a batch.
    """

    ids: Int64Array  # [S]
    positions: Int32Array  # [S] completion offset of the run's first token
    offsets: Int32Array  # [S+1] into tokens and logprobs
    tokens: Int32Array  # [N]
    logprobs: Float32Array  # [N]
    versions: Int64Array  # [S]
    finished_ids: Int64Array  # [F]
    finish_reasons: list[str]  # [F] "stop" | "length" | "abort" | "error: ..."


class DeltaBuffer:
    """Collects runs and finishes between two ticks. Not thread-safe: one owner."""

    def __init__(self) -> None:
        # Columns: ids, positions, counts, tokens, logprobs, versions.
        self._runs: list[tuple[NDArray[Any], ...]] = []
        self._finished_ids: list[int] = []
        self._finish_reasons: list[str] = []

    @property
    def has_finishes(self) -> bool:
        return bool(self._finished_ids)

    @property
    def is_empty(self) -> bool:
        return not self._runs and not self._finished_ids

    def add_runs(
        self,
        *,
        ids: Int64Array,
        positions: Int64Array,
        counts: Int64Array,
        tokens: Int32Array,
        logprobs: Float32Array,
        version: int,
    ) -> None:
        """Adds runs that lie one after the other in `tokens` and `logprobs`; copies all of them."""
        versions = np.full(len(ids), version, np.int64)
        self._runs.append((ids, positions, counts, tokens, logprobs, versions))

    def add_finish(self, request_id: int, reason: str) -> None:
        self._finished_ids.append(request_id)
        self._finish_reasons.append(reason)

    def clear(self) -> None:
        self._runs.clear()
        self._finished_ids.clear()
        self._finish_reasons = []  # the old list left with a batch

    def take(self) -> DeltaColumns | None:
        if self.is_empty:
            return None
        batch = empty_batch()
        if self._runs:
            ids, positions, counts, tokens, logprobs, versions = map(
                np.concatenate, zip(*self._runs, strict=True)
            )
            batch["ids"] = ids
            batch["positions"] = positions.astype(np.int32)
            batch["offsets"] = np.zeros(len(counts) + 1, np.int32)
            np.cumsum(counts, out=batch["offsets"][1:])
            batch["tokens"] = tokens
            batch["logprobs"] = logprobs
            batch["versions"] = versions
        batch["finished_ids"] = np.array(self._finished_ids, np.int64)
        batch["finish_reasons"] = self._finish_reasons
        self.clear()
        return batch


def empty_batch() -> DeltaColumns:
    return DeltaColumns(
        ids=np.zeros(0, np.int64),
        positions=np.zeros(0, np.int32),
        offsets=np.zeros(1, np.int32),
        tokens=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int64),
        finished_ids=np.zeros(0, np.int64),
        finish_reasons=[],
    )
