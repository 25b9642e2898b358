"""The engine's side of a weight update, as the shell sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class WeightUpdates(Protocol):
    """Loads new weights. The shell calls one method after the other, except `stop`:

    begin ─▶ is_prepared ─▶ load ─▶ verify ─▶ end          `abort` if the update is aborted
    """

    async def begin(self, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        """Prepares for one version; arguments and errors as in `Engine.prepare_update`."""
        ...

    async def is_prepared(self) -> bool:
        """Whether what `begin` started is done; the shell asks until it is. `load` may come
        earlier, and then waits."""
        return True

    async def load(self) -> int:
        """Loads all weights as the ranks provide them, and returns their bytes. When it returns,
        the engine has the new weights.

        Raises:
            WeightSyncError: the sync was aborted, or `stop` was called.
        """
        ...

    async def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        """See `Engine.verify_update`. Only called in syncs with checksums."""
        ...

    def stop(self) -> None:
        """Ends a `load` that waits for ranks."""
        ...

    async def end(self) -> None:
        """Leaves the update, which is committed. Idempotent."""
        ...

    async def abort(self) -> None:
        """Leaves the update, and lets go of the ranks' memory, because ranks may have ended. Also
        called without an update, before other ranks come. Idempotent."""
        ...

    async def release(self) -> None:
        """Called when the engine goes to sleep: leaves the update, and frees what is the engine's
        own."""
        ...

    async def close(self) -> None:
        """Called when the engine ends, even during a `load`. Frees everything. Idempotent."""
        ...
