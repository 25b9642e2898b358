"""Tokens of all attempts in flight, in columns: all runs of a batch of deltas are applied at once.

An attempt is a request that an engine works on. It has a row from the moment the engine gets it
until it ends; then the trajectory copies its tokens (`Trajectory.settle`).

S: runs of a batch, N: tokens in them, K: runs that were appended.
"""

from __future__ import annotations

import mmap
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.engine_api.token_deltas import DeltaBatch

_FIRST_ROWS: Final = 256
_NO_VERSION: Final = -1
_NOBODY: Final = -1

T = TypeVar("T", bound=np.generic)

_SHIFT: Final = 5
PAGE_LEN: Final = 1 << _SHIFT
"""Longer wastes memory, half a page per sequence at 8 bytes a token; shorter takes time."""
_FIRST_PAGES: Final = 256

EMPTY: Final = PAGE_LEN
"""The cursor of a sequence without tokens."""

# Shorter tables would be rebuilt too often to be worth the memory they save.
_MIN_LENGTH: Final = 1024

NO_ROW: Final = 0


class Segment(NamedTuple):
    """A run of completion tokens made under one version (NOT_GENERATED: given tokens)."""

    start: int
    stop: int
    version: int


class Runs(NamedTuple):
    """Runs that were appended to trajectories, in columns."""

    uids: NDArray[np.int64]  # [K] of the trajectories
    starts: NDArray[np.int64]  # [K] completion offset of each run's first token
    offsets: NDArray[np.int64]  # [K+1] into tokens and logprobs
    versions: NDArray[np.int64]  # [K] int64
    tokens: NDArray[np.int32]  # [N]
    logprobs: NDArray[np.float32]  # [N]

    def recorded(self) -> Runs:
        is_recorded = self.uids >= 0
        if is_recorded.all():
            return self
        counts = np.diff(self.offsets)
        offsets = np.zeros(int(np.count_nonzero(is_recorded)) + 1, np.int64)
        np.cumsum(counts[is_recorded], out=offsets[1:])
        tokens = np.repeat(is_recorded, counts)
        return Runs(
            self.uids[is_recorded],
            self.starts[is_recorded],
            offsets,
            self.versions[is_recorded],
            self.tokens[tokens],
            self.logprobs[tokens],
        )


class Applied(NamedTuple):
    """The result of applying a batch."""

    runs: Runs | None  # what was appended; None if nothing was
    irregular: list[int]  # runs to apply one by one: not simple, or in `singly`
    num_late: int  # runs of requests that this engine does not hold
    num_late_tokens: int


class TokenStore:
    """Rows of attempts. Row 0 stays empty: lookups of unknown requests return it.

    Columns: `_owners` the engine's number; `_lengths` and `_limits` of the completion, now and at
    most; `_starts` where the tokens of the last version, in `_versions`, begin; `_cursors` into the
    pages. Attempts with tokens of several versions have the earlier segments in `_earlier`.
    """

    def __init__(self) -> None:
        self._pages = TokenPages()
        self._requests = RequestRows()
        self._owners = np.full(_FIRST_ROWS, _NOBODY, np.int64)
        self._uids = np.zeros(_FIRST_ROWS, np.int64)
        self._lengths = np.zeros(_FIRST_ROWS, np.int64)
        self._limits = np.zeros(_FIRST_ROWS, np.int64)
        self._starts = np.zeros(_FIRST_ROWS, np.int64)
        self._versions = np.zeros(_FIRST_ROWS, np.int64)
        self._cursors = np.zeros(_FIRST_ROWS, np.int64)
        self._marks = np.zeros(_FIRST_ROWS, np.int64)  # scratch of `_extends_row`
        self._free = list(range(_FIRST_ROWS - 1, 0, -1))
        self._earlier: dict[int, list[Segment]] = {}

    def open(self, request_id: int, owner: int, uid: int, *, length: int, capacity: int) -> int:
        """Takes a row for an attempt on a trajectory of `length` tokens, which may add `capacity`.
        `request_id` is greater than all earlier ones; `owner`, the engine's number, is at least 0.
        """
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._owners[row] = owner
        self._uids[row] = uid
        self._lengths[row] = length
        self._limits[row] = length + capacity
        self._starts[row] = length
        self._versions[row] = _NO_VERSION
        self._cursors[row] = EMPTY
        self._requests.put(request_id, row)
        return row

    def close(self, request_id: int, row: int) -> None:
        self._requests.drop(request_id)
        self._pages.release(self._cursors.item(row))
        self._earlier.pop(row, None)
        self._owners[row] = _NOBODY
        self._free.append(row)

    def length(self, row: int) -> int:
        """Tokens of the completion, those from before the attempt included."""
        return self._lengths.item(row)

    def last_token(self, row: int) -> int:
        return self._pages.last_token(self._cursors.item(row))

    def read(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Copies of the attempt's tokens and logprobs."""
        return self._pages.read(self._cursors.item(row))

    def segments(self, row: int) -> list[Segment]:
        earlier = self._earlier.get(row, [])
        start, stop = self._starts.item(row), self._lengths.item(row)
        if start == stop:
            return earlier
        return [*earlier, Segment(start, stop, self._versions.item(row))]

    def append(
        self, row: int, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], version: int
    ) -> None:
        """Appends one run; the caller has checked that it fits."""
        if len(tokens) == 0:
            return
        known = self._versions.item(row)
        if known != version:
            if known != _NO_VERSION:
                self._earlier[row] = self.segments(row)
            self._starts[row] = self._lengths[row]
            self._versions[row] = version
        offsets = np.asarray([0, len(tokens)], np.int64)
        self._write(np.asarray([row], np.int64), offsets, tokens, logprobs)

    def apply(
        self, owner: int, batch: DeltaBatch, singly: NDArray[np.bool_] | None = None
    ) -> Applied:
        """Appends runs that simply extend their rows; `singly` [S] are left to the caller."""
        rows = self._requests.find(batch.ids)
        mine = self._owners[rows] == owner
        extends = mine & self._extends_row(rows, batch, singly)
        num_late = len(rows) - int(np.count_nonzero(mine))
        late = (num_late, int(np.diff(batch.bounds)[~mine].sum()) if num_late else 0)
        if extends.all():
            irregular, chosen = list[int](), batch
        else:
            irregular = np.flatnonzero(mine & ~extends).tolist()
            chosen = batch.select(extends)
            rows = rows[extends]
        if not len(rows):
            return Applied(None, irregular, *late)
        self._versions[rows] = chosen.versions
        self._write(rows, chosen.bounds, chosen.tokens, chosen.logprobs)
        runs = Runs(
            self._uids[rows],
            chosen.positions,
            chosen.bounds,
            chosen.versions,
            chosen.tokens,
            chosen.logprobs,
        )
        return Applied(runs, irregular, *late)

    def _extends_row(
        self, rows: NDArray[np.int64], batch: DeltaBatch, singly: NDArray[np.bool_] | None
    ) -> NDArray[np.bool_]:
        """[S] whether a run has tokens, begins where its row ends, fits, and is of its version."""
        lengths, versions = self._lengths[rows], self._versions[rows]
        counts = np.diff(batch.bounds)
        extends: NDArray[np.bool_] = (counts > 0) & (batch.positions == lengths)
        extends &= lengths + counts <= self._limits[rows]
        extends &= (versions == batch.versions) | (versions == _NO_VERSION)
        if singly is not None:
            extends &= ~singly
        # A request with several runs in the batch has them appended one by one, in order.
        numbers = np.arange(len(rows))
        self._marks[rows] = numbers
        is_hidden = self._marks[rows] != numbers
        if is_hidden.any():
            extends &= ~np.isin(rows, rows[is_hidden])
        return extends

    def _write(
        self,
        rows: NDArray[np.int64],
        offsets: NDArray[np.int64],
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
    ) -> None:
        counts = np.diff(offsets)
        cursors = self._cursors[rows]
        self._cursors[rows] = self._pages.append(cursors, offsets[:-1], counts, tokens, logprobs)
        self._lengths[rows] += counts

    def _grow(self) -> None:
        old = len(self._owners)
        more = np.zeros(old, np.int64)
        self._owners = np.concatenate([self._owners, more + _NOBODY])
        self._uids = np.concatenate([self._uids, more])
        self._lengths = np.concatenate([self._lengths, more])
        self._limits = np.concatenate([self._limits, more])
        self._starts = np.concatenate([self._starts, more])
        self._versions = np.concatenate([self._versions, more])
        self._cursors = np.concatenate([self._cursors, more])
        self._marks = np.concatenate([self._marks, more])
        self._free += range(2 * old - 1, old - 1, -1)

    def check_integrity(self) -> None:
        """Asserts that every row and page is either free or in use, and in one place only."""
        used: list[int] = np.flatnonzero(self._owners != _NOBODY).tolist()
        rows = np.sort(np.asarray(used + self._free))
        assert np.array_equal(rows, np.arange(1, len(self._owners)))
        assert self._earlier.keys() <= set(used)
        assert (self._lengths[used] <= self._limits[used]).all()
        self._pages.check_integrity([self._cursors.item(row) for row in used])


class TokenPages:
    """Pages of tokens and logprobs. Arrays of cursors are int64.

    P: tokens in a page. Indices point into `tokens` and `logprobs`; page k holds the indices from
    k * P. A sequence is known by its cursor, the index of its next token. A cursor at a multiple of
    P is behind a full page, so the next token begins a new page. Page 0 is never used, so P, the
    index behind it, is the cursor of an empty sequence.
    """

    def __init__(self) -> None:
        self._tokens = _GrowingArray[np.int32](np.dtype(np.int32), _FIRST_PAGES * PAGE_LEN)
        self._logprobs = _GrowingArray[np.float32](np.dtype(np.float32), _FIRST_PAGES * PAGE_LEN)
        self._before = np.zeros(_FIRST_PAGES, np.int32)  # [pages] the page before; 0: none
        # A stack of page numbers; the lowest are on top, for the sake of caches.
        self._free = np.arange(_FIRST_PAGES - 1, 0, -1, dtype=np.int32)
        self._num_free = len(self._free)

    def append(
        self,
        cursors: NDArray[np.int64],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
    ) -> NDArray[np.int64]:
        """Appends to R different sequences; returns their new cursors [R]. A sequence's new tokens
        are the `counts` [R] ones from `starts` [R] in `tokens` and `logprobs`."""
        cursors, starts, counts = cursors.copy(), starts.copy(), counts.copy()
        todo: slice | NDArray[np.int64] = slice(None)
        free: int | NDArray[np.int64] = -cursors & (PAGE_LEN - 1)
        while True:
            takes = np.minimum(free, counts[todo])
            self._copy(cursors[todo], starts[todo], takes, tokens, logprobs)
            cursors[todo] += takes
            starts[todo] += takes
            counts[todo] -= takes
            todo = np.flatnonzero(counts)
            if not len(todo):
                return cursors
            cursors[todo] = self._add_pages(cursors[todo])
            free = PAGE_LEN

    def _copy(
        self,
        indices: NDArray[np.int64],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
    ) -> None:
        ends = np.cumsum(counts)
        firsts = ends - counts
        steps: NDArray[np.int64] = np.arange(int(ends[-1]))
        targets = np.repeat(indices - firsts, counts) + steps
        sources = np.repeat(starts - firsts, counts) + steps
        self._tokens.array[targets] = tokens[sources]
        self._logprobs.array[targets] = logprobs[sources]

    def _add_pages(self, cursors: NDArray[np.int64]) -> NDArray[np.int64]:
        """Adds a page behind each cursor, all of which are at a page's end; the new cursors."""
        while self._num_free < len(cursors):
            self._grow()
        first_taken = self._num_free - len(cursors)
        pages = self._free[first_taken : self._num_free].astype(np.int64)
        self._num_free = first_taken
        self._before[pages] = (cursors - 1) >> _SHIFT
        return pages << _SHIFT

    def _grow(self) -> None:
        old, new = len(self._before), 2 * len(self._before)
        self._tokens.grow(new * PAGE_LEN)
        self._logprobs.grow(new * PAGE_LEN)
        self._before = np.concatenate([self._before, np.zeros(new - old, np.int32)])
        fresh = np.arange(new - 1, old - 1, -1, dtype=np.int32)
        self._free = np.concatenate([fresh, self._free[: self._num_free]])
        self._free = np.concatenate([self._free, np.zeros(old, np.int32)])
        self._num_free += new - old

    def last_token(self, cursor: int) -> int:
        return int(self._tokens.array[cursor - 1])

    def read(self, cursor: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Copies of a sequence's tokens and logprobs."""
        pages = np.asarray(self._chain(cursor), np.int64)
        indices = ((pages << _SHIFT)[:, None] + np.arange(PAGE_LEN)).reshape(-1)
        unused = -cursor & (PAGE_LEN - 1)
        indices = indices[: len(indices) - unused]
        return self._tokens.array[indices], self._logprobs.array[indices]

    def release(self, cursor: int) -> None:
        pages = self._chain(cursor)
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def _chain(self, cursor: int) -> list[int]:
        pages: list[int] = []
        page = (cursor - 1) >> _SHIFT
        while page:
            pages.append(page)
            page = self._before.item(page)
        pages.reverse()
        return pages

    def check_integrity(self, cursors: list[int]) -> None:
        """Asserts that every page is free or held by exactly one of these sequences."""
        held = [page for cursor in cursors for page in self._chain(cursor)]
        pages = np.sort(np.concatenate([np.asarray(held, np.int32), self._free[: self._num_free]]))
        assert np.array_equal(pages, np.arange(1, len(self._before))), (len(held), self._num_free)


class _GrowingArray(Generic[T]):
    """An array that grows without being copied, and takes memory only as it is written to."""

    def __init__(self, dtype: np.dtype[T], length: int) -> None:
        self._dtype = dtype
        nbytes = length * dtype.itemsize
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.array: NDArray[Any] = np.frombuffer(self._memory, dtype)

    def grow(self, length: int) -> None:
        """No view of `array` may exist."""
        self.array = np.empty(0, self._dtype)
        self._memory.resize(length * self._dtype.itemsize)
        self.array = np.frombuffer(self._memory, self._dtype)


class RequestRows:
    """Maps request ids to rows. Ids only grow, so an array that covers their span is enough. The
    first and the last entry stay empty: lookups of ids beyond either end land there."""

    def __init__(self) -> None:
        self._first_id = 0  # of the first entry
        self._rows = np.zeros(_MIN_LENGTH, np.int64)

    def put(self, request_id: int, row: int) -> None:
        """Adds a request, whose id must be greater than all earlier ones."""
        if request_id - self._first_id + 1 >= len(self._rows):
            self._rebuild(request_id)
        self._rows[request_id - self._first_id] = row

    def drop(self, request_id: int) -> None:
        self._rows[request_id - self._first_id] = NO_ROW

    def find(self, request_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """[N] rows of requests; `NO_ROW` for unknown ones."""
        return self._rows.take(request_ids - self._first_id, mode="clip")

    def _rebuild(self, request_id: int) -> None:
        """Forgets ids below the first request and doubles the remaining span."""
        used = np.flatnonzero(self._rows)
        first = int(used[0]) if len(used) else request_id - self._first_id
        kept = self._rows[first:]
        self._first_id += first - 1
        length = max(_MIN_LENGTH, 2 * (request_id - self._first_id + 2))
        self._rows = np.zeros(length, np.int64)
        self._rows[1 : 1 + len(kept)] = kept
