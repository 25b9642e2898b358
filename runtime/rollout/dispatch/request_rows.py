"""Which row of a table a request has: request ids are counted up, so an array will do."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

# Below this making room is too frequent to be worth the memory it saves.
_MIN_LENGTH: Final = 1024

NO_ROW: Final = 0


class RequestRows:
    """Rows by request id; takes memory for the span of the ids that are in it.

    The first and the last entry stay empty: ids beyond either end are looked up there.
    """

    def __init__(self) -> None:
        self._first_id = 0  # of the first entry
        self._rows = np.zeros(_MIN_LENGTH, np.int64)

    def put(self, request_id: int, row: int) -> None:
        """Adds a request, whose id is above all before it."""
        if request_id - self._first_id + 1 >= len(self._rows):
            self._make_room(request_id)
        self._rows[request_id - self._first_id] = row

    def drop(self, request_id: int) -> None:
        self._rows[request_id - self._first_id] = NO_ROW

    def find(self, request_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of requests, `NO_ROW` where one is not known."""
        return self._rows.take(request_ids - self._first_id, mode="clip")

    def _make_room(self, request_id: int) -> None:
        """Forgets what is below the first request; twice the span that is left gets room."""
        used = np.flatnonzero(self._rows)
        first = int(used[0]) if len(used) else request_id - self._first_id
        kept = self._rows[first:]
        self._first_id += first - 1
        length = max(_MIN_LENGTH, 2 * (request_id - self._first_id + 2))
        self._rows = np.zeros(length, np.int64)
        self._rows[1 : 1 + len(kept)] = kept
