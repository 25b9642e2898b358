from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

# Shorter tables would be rebuilt too often to be worth the memory they save.
_MIN_LENGTH: Final = 1024

NO_ROW: Final = 0


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
