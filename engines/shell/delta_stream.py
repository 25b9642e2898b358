"""Carries token deltas from an engine to its one consumer, on the engine's event loop.

    engine ──put──▶ [batches] ──read──▶ consumer A
                                        consumer B attaches: A's stream ends, A's requests are
                                        dropped, B reads from an empty queue

A batch never outlives its consumer: each detachment begins a new epoch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from umbra.runtime.engine_api.delta_buffer import DeltaColumns, empty_batch


class DeltaStream:
    """Owned by the engine. Holds a few bytes for every token of the consumer's requests. Calls
    `on_consumer_gone` with the new epoch to drop all requests."""

    def __init__(self, on_consumer_gone: Callable[[int], None]) -> None:
        self.epoch = 0
        self._on_consumer_gone = on_consumer_gone
        self._batches: deque[DeltaColumns] = deque()
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._num_consumers = 0
        self._has_consumer = False

    def put(self, batch: DeltaColumns) -> None:
        self._batches.append(batch)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._changed.set()

    async def read(self) -> AsyncGenerator[DeltaColumns, None]:
        """Yields an empty batch at once, which confirms the attachment, then the batches to come.
        The first consumer owns the requests submitted before. A second one ends the first one's
        stream and drops its requests, as detaching does."""
        if self._has_consumer:
            self._drop_requests()
        self._num_consumers += 1
        self._has_consumer = True
        me = self._num_consumers
        self._changed.set()
        try:
            yield empty_batch()
            while True:
                while me == self._num_consumers and self._batches:
                    yield self._batches.popleft()
                if me != self._num_consumers:
                    return
                if self._error is not None:
                    raise self._error
                self._changed.clear()
                await self._changed.wait()
        finally:
            if me == self._num_consumers:
                self._has_consumer = False
                self._drop_requests()

    def _drop_requests(self) -> None:
        self.epoch += 1
        self._batches.clear()
        self._on_consumer_gone(self.epoch)
