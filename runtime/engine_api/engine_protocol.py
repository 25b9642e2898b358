"""The protocol that every engine actor implements. Torch-free.

An engine is in PENDING_WEIGHTS until a first update is committed (or it loaded weights from disk),
then as `lifecycle` describes. It accepts requests only while SERVING: otherwise `submit` raises
EngineError, and ValueError for a request that could never be served.

Besides the calls below an engine may have `run()`, see `umbra.runtime.actor.actor_spec`, and

    def progress(self) -> object | None

which returns a value that changes as the engine makes progress with its requests; None while it is
idle. If the value does not change for `ActorSpec.stall_limit_s`, the engine is killed and replaced.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict

from umbra.runtime.engine_api.lifecycle import SleepLevel, Tag
from umbra.runtime.engine_api.token_deltas import DeltaColumns

PauseMode = Literal["abort", "keep", "drain"]


class EngineStats(TypedDict):
    """A snapshot; bytes are current: resident in this process, of weights, and of cache."""

    running: int
    waiting: int
    tokens_total: int
    kv_tokens_used: int
    version: int  # -1: no weights held for certain
    resident_nbytes: int
    weights_nbytes: int
    kv_nbytes: int


class Engine(Protocol):
    """The supervisor and the rollout manager make all calls."""

    async def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Accepts all requests (see `generation_request`) or, with an error, none. Raises
        IllegalTransition while the engine does not serve."""
        ...

    def deltas(self) -> AsyncGenerator[DeltaColumns, None]:
        """Batches of tokens and finishes, at most one a tick; one consumer at a time."""
        ...

    async def abort(self, ids: Sequence[int] | None) -> int:
        """Ends requests (None: all) with reason "abort" after their sampled tokens;
        returns the count."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Returns when nothing is generated any more. "abort" ends all requests, "keep" freezes
        them with their KV cache, "drain" first lets them finish."""
        ...

    async def resume(self) -> None:
        """Takes memory for the KV cache if that sleeps, and generates under the version held."""
        ...

    async def sleep(self, level: SleepLevel, tags: Sequence[Tag] = ("kv_cache", "weights")) -> None:
        """Frees the parts in `tags`: level 1 keeps the weights on the host, level 2 loses them."""
        ...

    async def wake(self, tags: Sequence[Tag]) -> None:
        """Allocates memory again for the parts in `tags` that sleep."""
        ...

    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str:
        """Why the ranks' memory (`rank_exports`) cannot be read here, or "". Allowed in any state.
        If it can be read, an update may bring "exports" in place of buckets."""
        ...

    async def prepare_update(
        self, version: int, manifest: bytes, buckets: Mapping[str, Any]
    ) -> None:
        """Prepares for the weights of `version`, and changes nothing else. Allowed in any
        state except between `load` and `commit_update` or `abort_update`. A sleep discards
        the preparation."""
        ...

    async def load(self) -> dict[str, int]:
        """Loads every bucket as soon as all ranks have filled it, after waking weights that sleep.

        Returns {"nbytes": bytes loaded}, the size of all tensors if nothing is missing; the model
        then has the weights. From the call on, the weights have no version until `commit_update`.
        It may be called once per update. Raises WeightSyncError when the sync is aborted, with
        weights half written; `abort_update` follows.
        """
        ...

    async def verify_update(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        """Compares loaded checksums with `regions`, each [image offset, nbytes, checksum]. Called
        in syncs with checksums. Returns a text for each difference; with any, the update cannot be
        committed. Changes nothing."""
        ...

    async def commit_update(self) -> None:
        """Makes the prepared version the one held, wakes the KV cache if it sleeps, and resumes."""
        ...

    async def abort_update(self) -> None:
        """Ends the update half way. Before `load`, the engine keeps its weights; afterwards another
        update must follow before it serves anything."""
        ...

    async def stats(self) -> EngineStats: ...
