"""The core of an engine: the small part that is not the same for all. `EngineShell` does the rest.

    Core            states: every engine
    └ PolledCore    requests whose tokens are taken once a tick (`PolledRequests`)
      └ AdapterCore   weights that the engine loads from a description (`ImageUpdates`)

docs/write-an-engine.md goes through them method by method.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from umbra.engines.shell.weight_import import WorkerRegions
from umbra.runtime.engine_api.generation_request import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOutput:
    """What has come for one request since it was last asked.

    Attributes:
        logprobs: one for each token.
        finish_reason: "stop", "length", "abort" or the engine's own word; None: it goes on.
        num_older: so many of the first tokens may have been made by the weights before those held.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None
    num_older: int = 0


class Output(Protocol):
    """The tokens of one request as they gather in the engine's frontend."""

    @property
    def changed(self) -> asyncio.Event:
        """Set by the end and a failure at the latest; `take` clears it."""
        ...

    def take(self) -> NewOutput | None:
        """All that is new, or None; raises what the engine failed with."""
        ...


class Core(ABC):
    """Owns an engine, and its processes where it has some, from `start` to `stop`.

    The shell calls from one event loop, one method after the other, `abort`, `check_request` and
    what is synchronous excepted. Whatever the engine raises comes as EngineError; umbra's own
    errors and ValueError as they are.

    Attributes:
        name: of the engine, for messages.
        lora_names: adapters that requests may name.
        died: set when a process of the engine ends; the engine is of no use then.
        is_paused: follows what the engine does, also by itself.
        vocab_size: known once it has started; requests' tokens are below it.
        memory: bytes, "weights_nbytes" and "kv_nbytes"; with `frees_memory_asleep` those it has
            when awake, else those it has now.
        keeps_requests_asleep: frozen requests outlive a sleep; else they are aborted before it.
    """

    name: str
    lora_names: Collection[str] = ()
    keeps_requests_asleep: bool = False

    def __init__(self) -> None:
        self.died = asyncio.Event()
        self.is_paused = False
        self.vocab_size = 0
        self.memory: Mapping[str, int] = {"weights_nbytes": 0, "kv_nbytes": 0}

    @property
    def frees_memory_asleep(self) -> bool:
        return True

    async def start(self) -> None:
        """May block the loop: processes are started from the main thread only.

        Raises:
            ConfigError, DataError: the engine or the settings cannot be used.
            EngineError: the engine did not start; its own processes said why in the log.
        """
        return

    async def stop(self) -> None:
        """Ends the engine's processes, first of all, and its tasks. Idempotent."""
        return

    def check_request(self, request: GenerationRequest) -> None:
        """Raises ValueError for what the engine would refuse or silently change."""
        return

    # -- states --------------------------------------------------------------------------

    @abstractmethod
    async def pause(self, *, keep: bool) -> None:
        """Until nothing runs: requests are kept as they are with their cache, or ended, the tokens
        delivered of all that run. Sets `is_paused`."""

    @abstractmethod
    async def resume(self) -> None:
        """Clears `is_paused`."""

    async def sleep(self, level: int) -> None:
        """Frees memory: 1 keeps the weights on the host, 2 loses them. Nothing runs; with
        `keeps_requests_asleep` frozen requests may be there, else none."""
        return

    async def wake(self, tags: Sequence[str]) -> None:
        """Takes memory again."""
        return

    @abstractmethod
    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str:
        """Why not every worker can read the ranks' memory, or "": see `Engine.probe_import`."""


class PolledCore(Core):
    """A core whose tokens gather in outputs on the event loop.

    Attributes:
        ended: set when a request has ended, by an engine that tells; whoever takes it clears this.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()

    @abstractmethod
    async def add(
        self, key: str, request: GenerationRequest, cache_salt: str, num_running: int
    ) -> Output:
        """Takes a request.

        Args:
            key: its name here, never used again, unlike the request's id.
            cache_salt: it may share cached prefixes with requests of the same salt only.
            num_running: requests that will run at once as far as is known, this one included.
        """

    @abstractmethod
    async def abort(self, keys: Iterable[str]) -> None:
        """Ends them at once, as their outputs say; unknown keys are nothing."""


class AdapterCore(PolledCore):
    """The core of an adapter: a library that loads weights by itself, mostly in its workers."""

    def show_stacks(self) -> None:
        """Has the engine's processes write where they are to the log, where they can."""
        return

    @abstractmethod
    async def load_weights(self, description: Mapping[str, Any]) -> Sequence[WorkerRegions]:
        """Gives the model the weights described, in every worker of the engine.

        Args:
            description: of a `WeightImage` or a `WeightImport`, for `weight_source`
                in the workers.

        Returns:
            What each worker has read of the ranks' own memory.

        Raises:
            EngineError: they do not fit, or loading failed; nothing is known of the weights then.
        """
