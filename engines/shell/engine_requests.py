from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TypedDict

from umbra.engines.shell.delta_stream import DeltaStream
from umbra.runtime.engine_api.generation_request import GenerationRequest


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
    def begin_update(self) -> None:
        """No token is made until `commit_update`, or until the update ends."""

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
