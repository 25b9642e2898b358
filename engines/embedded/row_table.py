from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from umbra.runtime.engine_api.delta_buffer import DeltaBuffer
from umbra.runtime.engine_api.generation_request import GenerationRequest

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]


class RowTable:
    """The running sequences as columns: row i of every array is cache row i; 0..count-1 are in use.
    With a small model, Python per sequence would cost more than the model. R: rows, C: longest
    context, W: widest list of stop tokens."""

    def __init__(self, *, max_rows: int, max_context_len: int) -> None:
        self.count = 0
        self.requests: list[GenerationRequest] = []
        self.tokens = np.zeros((max_rows, max_context_len + 1), np.int32)  # [R, C+1]
        self.logprobs = np.zeros((max_rows, max_context_len + 1), np.float32)
        self.ids = np.zeros(max_rows, np.int64)
        self.arrivals = np.zeros(max_rows, np.int64)
        self.seeds = np.zeros(max_rows, np.uint64)
        self.lens = np.zeros(max_rows, np.int64)  # tokens known
        self.sent = np.zeros(max_rows, np.int64)  # tokens known to the consumer
        self.ends = np.zeros(max_rows, np.int64)  # tokens at which max_new_tokens is reached
        self.offsets = np.zeros(max_rows, np.int64)  # completion position minus sequence position
        self.temperatures = np.zeros(max_rows, np.float64)  # 1 where greedy
        self.is_greedy = np.zeros(max_rows, np.bool_)
        self.top_ps = np.ones(max_rows, np.float64)  # 1 where greedy
        self.top_ks = np.zeros(max_rows, np.int64)  # 0: all tokens
        self.stops = np.full((max_rows, 1), -1, np.int32)  # [R, W], -1 where unused
        self._numbers = np.arange(max_rows)
        self._scalars: tuple[npt.NDArray[Any], ...] = (
            self.ids,
            self.arrivals,
            self.seeds,
            self.lens,
            self.sent,
            self.ends,
            self.offsets,
            self.temperatures,
            self.is_greedy,
            self.top_ps,
            self.top_ks,
        )

    def append(self, request: GenerationRequest, arrival: int) -> None:
        row, num_tokens = self.count, len(request.tokens)
        self.count += 1
        self.requests.append(request)
        self.tokens[row, :num_tokens] = request.tokens
        self.ids[row] = request.id
        self.arrivals[row] = arrival
        self.seeds[row] = request.seed
        self.lens[row] = self.sent[row] = num_tokens
        self.ends[row] = num_tokens + request.max_new_tokens
        self.offsets[row] = request.position - num_tokens
        self.is_greedy[row] = request.temperature == 0
        self.temperatures[row] = request.temperature or 1.0
        self.top_ps[row] = request.top_p if request.temperature else 1.0
        self.top_ks[row] = request.top_k if request.temperature else 0
        num_stops = len(request.stop_token_ids)
        if num_stops > self.stops.shape[1]:
            wider = np.full((len(self.stops), num_stops), -1, np.int32)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[row] = -1
        self.stops[row, :num_stops] = request.stop_token_ids

    def push(self, first: int, tokens: Int64Array, logprobs: npt.NDArray[np.float32]) -> None:
        rows, lens = self._numbers[first : self.count], self.lens[first : self.count]
        self.tokens[rows, lens] = tokens
        self.logprobs[rows, lens] = logprobs
        lens += 1

    def finished(self, first: int, tokens: Int64Array) -> tuple[BoolArray, BoolArray]:
        """Which rows from `first` on stop with `tokens`, and which reach their length."""
        rows = slice(first, self.count)
        stopped = (self.stops[rows] == tokens[:, None]).any(axis=1)
        return stopped, self.lens[rows] >= self.ends[rows]

    def cut_runs(self, rows: Int64Array, buffer: DeltaBuffer, version: int) -> None:
        counts = self.lens[rows] - self.sent[rows]
        rows, counts = rows[counts > 0], counts[counts > 0]
        if not len(rows):
            return
        sent = self.sent[rows]
        ends = counts.cumsum()
        columns = np.arange(int(ends[-1])) + np.repeat(sent - ends + counts, counts)
        repeated = np.repeat(rows, counts)
        buffer.add_runs(
            ids=self.ids[rows],
            positions=sent + self.offsets[rows],
            counts=counts,
            tokens=self.tokens[repeated, columns],
            logprobs=self.logprobs[repeated, columns],
            version=version,
        )
        self.sent[rows] = self.lens[rows]

    def all_rows(self) -> Int64Array:
        return self._numbers[: self.count]

    def rest_of(self, row: int) -> GenerationRequest:
        """The request that would continue this row elsewhere."""
        return self.requests[row].resumed(self.tokens[row, : self.lens[row]].copy())

    def remove(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Frees rows and closes the gaps; returns (from, to) of each row that moved."""
        removed = set(rows)
        num_kept = self.count - len(removed)
        gaps = sorted(row for row in removed if row < num_kept)
        movers = [row for row in range(num_kept, self.count) if row not in removed]
        for source, target in zip(movers, gaps, strict=True):
            self._move(source, target)
        del self.requests[num_kept:]
        self.count = num_kept
        return list(zip(movers, gaps, strict=True))

    def _move(self, source: int, target: int) -> None:
        num_tokens = self.lens[source]
        self.requests[target] = self.requests[source]
        self.tokens[target, :num_tokens] = self.tokens[source, :num_tokens]
        self.logprobs[target, :num_tokens] = self.logprobs[source, :num_tokens]
        self.stops[target] = self.stops[source]
        for column in self._scalars:
            column[target] = column[source]
