"""What every engine actor offers; see the methods' promises. Torch-free.

Life: PENDING_WEIGHTS until a first update is committed (or weights were loaded from disk), then
as `lifecycle` says. Requests are taken while SERVING only: otherwise `submit`
raises EngineError, and ValueError for a request that could never be served.

Beside the calls below an engine may have `run()`, see `umbra.runtime.actor.actor_spec`, and

    def progress(self) -> object | None

What changes as it gets on with its requests; None while it has nothing to do. Where that stands
still for `ActorSpec.stall_limit_s`, the engine is killed and replaced.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict

from umbra.runtime.engine_api.delta_buffer import DeltaColumns
from umbra.runtime.engine_api.lifecycle import SleepLevel, Tag

PauseMode = Literal["abort", "keep", "drain"]


class EngineStats(TypedDict):
    """A snapshot; bytes are of this process (resident) and of what it holds now."""

    running: int
    waiting: int
    tokens_total: int
    kv_tokens_used: int
    version: int  # -1: no weights held for certain
    resident_nbytes: int
    weights_nbytes: int
    kv_nbytes: int


class Engine(Protocol):
    """The engine protocol. Every call is made by the supervisor or the rollout manager."""

    async def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Takes all requests (see `generation_request`) or, with an error, none."""
        ...

    def deltas(self) -> AsyncGenerator[DeltaColumns, None]:
        """Batches of tokens and finishes, at most one a tick; one consumer at a time."""
        ...

    async def abort(self, ids: Sequence[int] | None) -> int:
        """Ends requests (None: all) with reason "abort" after their sampled tokens; how many."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Returns when nothing is generated any more: "abort" ends all requests, "keep" freezes
        them with their KV cache, "drain" first lets them finish."""
        ...

    async def resume(self) -> None:
        """Goes on generating under the version held."""
        ...

    async def sleep(self, level: SleepLevel) -> None:
        """Frees memory: 1 keeps the weights on the host and frees the KV cache, 2 frees both."""
        ...

    async def wake(self, tags: Sequence[Tag]) -> None:
        """Takes memory again for those of `tags` that sleep."""
        ...

    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str:
        """Why the ranks' memory (`rank_exports`) cannot be read here, or "".

        In any state. Where it can be, an update may bring "exports" in place of buckets.
        """
        ...

    async def begin_update(
        self, version: int, manifest: Mapping[str, Any], buckets: Mapping[str, Any]
    ) -> None:
        """No tokens are made until `commit_update` or `abort_update`."""
        ...

    async def load(self) -> dict[str, int]:
        """Takes every bucket as soon as all ranks have filled it; {"nbytes": bytes taken}.

        When it returns, the model has the weights.

        From here on the weights are of no version until `commit_update`. Called once an update.
        Raises WeightSyncError when the sync is given up, with weights half written; `abort_update`
        follows.
        """
        ...

    async def finish_update(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        """Verifies what was loaded, and changes nothing.

        {"count", "nbytes", "mismatches"} over [offset, nbytes, checksum] regions.
        """
        ...

    async def commit_update(self) -> None:
        """The weights are those of the version given to `begin_update`."""
        ...

    async def abort_update(self) -> None:
        """The update ends half way. Before `load` was called, the engine goes on with the weights
        that it had; else another one must follow before anything is served."""
        ...

    async def stats(self) -> EngineStats:
        """Counters and sizes."""
        ...
