"""The parts that differ between engines: a core and its weight updates. `EngineShell` does the
rest.

    Core              states: every engine
    └ PolledCore      requests whose tokens are taken once a tick (`PolledRequests`)
      └ AdapterCore   weights that the engine's workers load (`AdapterUpdates`)
    WeightUpdates     new weights: `AdapterUpdates`, or an engine's own

docs/write-an-engine.md explains them method by method.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from umbra.runtime.engine_api.generation_request import GenerationRequest
from umbra.runtime.engine_api.lora import LoraBase
from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOutput:
    """New output of one request since the last take.

    Attributes:
        logprobs: one for each token.
        finish_reason: "stop", "length", "abort" or the engine's own word; None while it continues.
        num_older: how many of the first tokens may come from the weights before the current ones.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None
    num_older: int = 0


class Output(Protocol):
    """The tokens of one request in the engine's frontend."""

    @property
    def changed(self) -> asyncio.Event:
        """Set at the latest by the end or a failure; `take` clears it."""
        ...

    def take(self) -> NewOutput | None:
        """All new output, or None. Raises the engine's failure."""
        ...


class Core(ABC):
    """Owns an engine, and its processes if any, from `start` to `stop`.

    The shell calls one method at a time from one event loop, except for `abort`, `check_request`
    and synchronous methods. The engine's own exceptions arrive as EngineError; umbra's errors and
    ValueError pass through.

    Attributes:
        name: the engine's, for messages.
        lora_names: adapters that requests may name.
        died: set when a process of the engine ends; the engine is unusable then.
        is_paused: follows the engine's state, even if the engine pauses or resumes by itself.
        vocab_size: known once the engine has started; requests' tokens are below it.
        memory: "weights_nbytes" and "kv_nbytes", while awake if `frees_memory_asleep`, else now.
        truncates: whether it samples with top-p and top-k; else such requests are refused.
        takes_forced: whether it returns the logprobs of a request's forced tokens; else such
            requests are refused.
        keeps_requests_asleep: whether frozen requests survive a sleep; else they are
            aborted before.
    """

    name: str
    lora_names: Collection[str] = ()
    truncates: bool = False
    takes_forced: bool = False
    keeps_requests_asleep: bool = False

    def __init__(self, lora_base: LoraBase | None = None) -> None:
        self._lora_base = lora_base
        self.died = asyncio.Event()
        self.is_paused = False
        self.vocab_size = 0
        self.memory: Mapping[str, int] = {"weights_nbytes": 0, "kv_nbytes": 0}

    @property
    def frees_memory_asleep(self) -> bool:
        return True

    def check_options(self) -> str:
        """The library's name and version, or "". Starts nothing. Raises
        ConfigError or DataError."""
        return ""

    async def start(self) -> None:
        """May block the loop, because only the main thread may start processes. Raises ConfigError,
        DataError, or EngineError if the engine did not start; its processes logged the reason."""
        return

    async def stop(self) -> None:
        """Ends the engine's processes first, then its tasks. Idempotent."""
        return

    def check_request(self, request: GenerationRequest) -> None:
        """Raises ValueError for a request that the engine would refuse or silently change."""
        return

    @abstractmethod
    async def pause(self, *, keep: bool) -> None:
        """Returns when nothing runs, and sets `is_paused`. With `keep`, requests are frozen with
        their cache; otherwise they end after their tokens are delivered."""

    @abstractmethod
    async def resume(self) -> None:
        """Clears `is_paused`."""

    async def sleep(self, level: int, tags: Sequence[str]) -> None:
        """Frees the parts in `tags`, which are both unless `EngineKind.sleeps_by_part`: level 1
        keeps the weights on the host, level 2 loses them. Nothing runs, and requests are frozen
        only with `keeps_requests_asleep`."""
        return

    async def wake(self, tags: Sequence[str]) -> None:
        return

    def check_update(self, manifest: Manifest) -> None:
        """Raises WeightSyncError for an update that the engine cannot load. With `lora_base`,
        updates bring LoRA adapters of that model, for all later requests; otherwise they bring the
        model's weights."""
        if self._lora_base is not None:
            self._lora_base.check(manifest.lora, manifest.shapes)
        elif manifest.lora is not None:
            raise WeightSyncError(
                f"the sync brings a LoRA adapter, and {self.name} was started for weights of the "
                "model: publish those, or start an engine that takes lora_rank with it"
            )


class PolledCore(Core):
    """A core whose tokens collect on the event loop. `ended` is set when a request has ended, if
    the engine reports it; the taker clears it."""

    def __init__(self, lora_base: LoraBase | None = None) -> None:
        super().__init__(lora_base)
        self.ended = asyncio.Event()

    @abstractmethod
    async def add(
        self, key: str, request: GenerationRequest, cache_salt: str, num_running: int
    ) -> Output:
        """Takes a request.

        Args:
            key: names the request and, unlike its id, is never reused.
            cache_salt: only requests with the same salt may share cached prefixes.
            num_running: requests expected to run at once, including this one.
        """

    @abstractmethod
    async def abort(self, keys: Iterable[str]) -> None:
        """Ends requests at once, through their outputs; ignores unknown keys."""


class WeightUpdates(Protocol):
    """The engine's side of a weight update. The shell calls one method at a time, except `stop`:

    begin ─▶ is_prepared ─▶ load ─▶ verify ─▶ end          `abort` if the update is aborted
    """

    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str:
        """See `Engine.probe_import`."""
        ...

    async def begin(self, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        """Prepares one version; arguments and errors as in `Engine.prepare_update`."""
        ...

    async def is_prepared(self) -> bool:
        """Whether the work of `begin` is done. `load` may come earlier, and then waits."""
        return True

    async def load(self) -> int:
        """Loads all weights as the ranks provide them; returns their bytes. Raises WeightSyncError
        if the sync was aborted or `stop` was called."""
        ...

    async def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        """See `Engine.verify_update`. Only called in syncs with checksums."""
        ...

    def stop(self) -> None:
        """Ends a `load` that waits for ranks."""
        ...

    async def end(self) -> None: ...

    async def abort(self) -> None:
        """Leaves the update and closes the ranks' memory, because ranks may have ended. Also called
        before other ranks come. Idempotent."""
        ...

    async def release(self) -> None: ...

    async def close(self) -> None:
        """Frees everything, even during a `load`. Idempotent."""
        ...
