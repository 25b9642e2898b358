"""Requests of an engine as the shell sees them, from their submission to their last token."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TypedDict

from umbra.engines.shell.delta_stream import DeltaStream
from umbra.runtime.engine_api.generation_request import GenerationRequest


class RequestCounts(TypedDict):
    """The part of `EngineStats` that requests make."""

    running: int
    waiting: int
    tokens_total: int
    kv_tokens_used: int


class EngineRequests(ABC):
    """Knows which requests there are, and brings their tokens to the stream. Event loop only.

    Attributes:
        stream: the way of the batches to the consumer.
        all_ended: set while there is no request.
    """

    def __init__(self) -> None:
        self.stream = DeltaStream(self._on_consumer_gone)
        self.all_ended = asyncio.Event()
        self.all_ended.set()

    @property
    @abstractmethod
    def ids(self) -> Collection[int]:
        """Of all requests whose end is not in the stream yet."""

    @abstractmethod
    async def run(self) -> None:
        """Until cancelled; raises what the engine fails with."""

    @abstractmethod
    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Gives new requests, whose ids are free, to the engine: all, or with an error none."""

    @abstractmethod
    async def abort(self, ids: Collection[int]) -> None:
        """Ends some of `ids`; all that they have made, and their ends, are in the stream then."""

    @abstractmethod
    async def deliver(self) -> None:
        """Returns when all that a paused engine has made is in the stream."""

    @abstractmethod
    def begin_update(self) -> None:
        """Other weights come: nothing is made until `commit_update`, or the update's end."""

    @abstractmethod
    def commit_update(self, version: int) -> None:
        """Tokens made from here on are of `version`."""

    @abstractmethod
    async def counts(self) -> RequestCounts: ...

    @abstractmethod
    def progress(self) -> int | None:
        """See `engine_protocol`."""

    @abstractmethod
    def _forget(self, epoch: int) -> None:
        """Drops all requests: their consumer has gone. Later ones are of `epoch`."""

    def _on_consumer_gone(self, epoch: int) -> None:
        self._forget(epoch)
        self._note_ends()

    def _note_ends(self) -> None:
        """Called after every change of `ids`."""
        if self.ids:
            self.all_ended.clear()
        else:
            self.all_ended.set()
