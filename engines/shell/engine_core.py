"""What an adapter asks of a foreign inference engine: the small part that is not the same for all.

`AdapterEngine` does the rest: gate, deltas, order of calls, weight image.
"""

from __future__ import annotations

import asyncio
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
        """Set by the first token, the end and a failure at the latest; `take` clears it."""
        ...

    def take(self) -> NewOutput | None:
        """All that is new, or None; raises what the engine failed with."""
        ...


class Core(Protocol):
    """Owns a foreign engine and its processes, from `start` to `stop`. One event loop.

    Whatever the engine raises comes as EngineError; umbra's own errors and ValueError as they are.

    Attributes:
        name: of the library, for messages.
        died: set when a process of the engine ends; the engine is of no use then.
        ended: set when a request has ended, by an engine that tells; whoever takes it clears this.
        is_paused: follows what the engine does, also by itself.
        memory: bytes when awake, "weights_nbytes" and "kv_nbytes".
        lora_names: adapters that requests may name.
    """

    name: str
    lora_names: Collection[str] = ()
    died: asyncio.Event
    ended: asyncio.Event
    is_paused: bool
    vocab_size: int
    memory: Mapping[str, int]

    @property
    def frees_memory_asleep(self) -> bool: ...

    async def start(self) -> None:
        """May block the loop: processes are started from the main thread only.

        Raises:
            ConfigError, DataError: the engine or the settings cannot be used.
            EngineError: the engine did not start; its own processes said why in the log.
        """
        ...

    async def stop(self) -> None:
        """Ends the engine's processes, first of all, and its tasks. Idempotent."""
        ...

    def show_stacks(self) -> None:
        """Has the engine's processes write where they are to the log, where they can."""
        return

    # -- requests ------------------------------------------------------------------------

    def check_request(self, request: GenerationRequest) -> None:
        """Raises ValueError for what the engine would refuse or silently change."""
        ...

    async def add(
        self, key: str, request: GenerationRequest, cache_salt: str, num_running: int
    ) -> Output:
        """Takes a request.

        Args:
            key: its name here, never used again, unlike the request's id.
            cache_salt: it may share cached prefixes with requests of the same salt only.
            num_running: requests that will run at once as far as is known, this one included.
        """
        ...

    async def abort(self, keys: Iterable[str]) -> None:
        """Ends them at once, as their outputs say; unknown keys are nothing."""
        ...

    # -- states --------------------------------------------------------------------------

    async def pause(self, *, keep: bool) -> None:
        """Until nothing runs: requests are kept as they are with their cache, or ended, the tokens
        delivered of all that run."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self, level: int) -> None:
        """Frees memory: 1 keeps the weights on the host, 2 loses them. Nothing runs or waits."""
        ...

    async def wake(self, tags: Sequence[str]) -> None: ...

    # -- weights -------------------------------------------------------------------------

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
        ...

    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str:
        """Why not every worker can read the ranks' memory, or "": see `Engine.probe_import`."""
        ...
