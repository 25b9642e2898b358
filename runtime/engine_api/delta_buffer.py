"""The columnar batches of token runs that an engine sends back, one batch a tick.

If an engine reports the end of a request, the batch does not wait for the tick, because a tool or
the next turn depends on it. A run is a stretch of one request's tokens made under one version. S:
runs in a batch, N: tokens in a batch, F: requests finished in a batch.
"""

from __future__ import annotations

from typing import Final, TypedDict

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

END_TICK_S: Final = 0.005
"""Requests that end within this time share a batch, as many with the same budget do."""


class DeltaColumns(TypedDict):
    """One wire batch. A finish comes with, or after, the request's last run, never before."""

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
        self._ids: list[Int64Array] = []
        self._positions: list[Int64Array] = []
        self._counts: list[Int64Array] = []
        self._tokens: list[Int32Array] = []
        self._logprobs: list[Float32Array] = []
        self._versions: list[Int64Array] = []
        self._finished_ids: list[int] = []
        self._finish_reasons: list[str] = []

    @property
    def has_finishes(self) -> bool:
        return bool(self._finished_ids)

    @property
    def is_empty(self) -> bool:
        return not self._ids and not self._finished_ids

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
        self._ids.append(ids)
        self._positions.append(positions)
        self._counts.append(counts)
        self._tokens.append(tokens)
        self._logprobs.append(logprobs)
        self._versions.append(np.full(len(ids), version, np.int64))

    def add_finish(self, request_id: int, reason: str) -> None:
        self._finished_ids.append(request_id)
        self._finish_reasons.append(reason)

    def clear(self) -> None:
        for column in (
            self._ids,
            self._positions,
            self._counts,
            self._tokens,
            self._logprobs,
            self._versions,
            self._finished_ids,
        ):
            column.clear()
        self._finish_reasons = []  # the old list left with a batch

    def take(self) -> DeltaColumns | None:
        if self.is_empty:
            return None
        batch = empty_batch()
        if self._ids:
            counts = np.concatenate(self._counts)
            offsets = np.zeros(len(counts) + 1, np.int32)
            np.cumsum(counts, out=offsets[1:])
            batch["ids"] = np.concatenate(self._ids)
            batch["positions"] = np.concatenate(self._positions).astype(np.int32)
            batch["offsets"] = offsets
            batch["tokens"] = np.concatenate(self._tokens)
            batch["logprobs"] = np.concatenate(self._logprobs)
            batch["versions"] = np.concatenate(self._versions)
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
