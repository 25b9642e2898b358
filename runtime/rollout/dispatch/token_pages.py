"""Memory for growing sequences of tokens: pages of one size, each linked to the one before it.

P: tokens in a page. Indices point into `tokens` and `logprobs`; page k holds the indices from
k * P. A sequence is known by its cursor, the index of its next token. A cursor at a multiple of P
is behind a full page, so the next token begins a new page. Page 0 is never used, so P, the index
behind it, is the cursor of an empty sequence.
"""

from __future__ import annotations

import mmap
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T", bound=np.generic)

_SHIFT: Final = 5
PAGE_LEN: Final = 1 << _SHIFT
"""Longer wastes memory, half a page per sequence at 8 bytes a token; shorter takes time."""
_FIRST_PAGES: Final = 256

EMPTY: Final = PAGE_LEN
"""The cursor of a sequence without tokens."""


class TokenPages:
    """Pages of tokens and logprobs. Arrays of cursors are int64."""

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
