from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import TypedDict

from umbra.runtime.engine_api.generation_request import GenerationRequest
from umbra.runtime.engine_api.token_deltas import DeltaColumns, empty_batch


class RequestCounts(TypedDict):
    running: int
    waiting: int
    tokens_total: int
    kv_tokens_used: int


class EngineRequests(ABC):
    """Owns an engine's requests, and moves their tokens to `stream`. Event loop only. `all_ended`
    is set while there is no request."""

    def __init__(self) -> None:
        self.stream = DeltaStream(self._on_consumer_gone)
        self.all_ended = asyncio.Event()
        self.all_ended.set()

    @property
    @abstractmethod
    def ids(self) -> Collection[int]:
        """Ids of all requests whose end is not in the stream yet."""

    @abstractmethod
    async def run(self) -> None:
        """Runs until cancelled; raises the engine's failure."""

    @abstractmethod
    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Submits requests whose ids are free: all, or none if it raises."""

    @abstractmethod
    async def abort(self, ids: Collection[int]) -> None:
        """Ends requests. When it returns, their tokens and ends are in the stream."""

    @abstractmethod
    async def deliver(self) -> None:
        """Returns when all tokens of a paused engine are in the stream."""

    @abstractmethod
    async def begin_update(self) -> None:
        """No token is made until `commit_update`, or until the update ends. Aborts requests that
        have no token yet, if they may share keys that older weights computed."""

    @abstractmethod
    def commit_update(self, version: int) -> None:
        """Tokens made from here on belong to `version`."""

    @abstractmethod
    async def counts(self) -> RequestCounts: ...

    @abstractmethod
    def progress(self) -> int | None:
        """See `engine_protocol`."""

    @abstractmethod
    def _forget(self, epoch: int) -> None:
        """Drops all requests, because their consumer has detached. Later ones belong to `epoch`."""

    def _on_consumer_gone(self, epoch: int) -> None:
        self._forget(epoch)
        self._note_ends()

    def _note_ends(self) -> None:
        """Called after every change of `ids`."""
        if self.ids:
            self.all_ended.clear()
        else:
            self.all_ended.set()


class DeltaStream:
    """Carries token deltas from an engine to its one consumer, on the engine's event loop. Calls
    `on_consumer_gone` with the new epoch to drop all requests. `EngineRequests` owns it.

        engine ──put──▶ [batches] ──read──▶ consumer A
                                            consumer B attaches: A's stream ends, A's requests are
                                            dropped, B reads from an empty queue

    A batch never outlives its consumer: each detachment begins a new epoch.
    """

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
