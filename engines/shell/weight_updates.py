from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class WeightUpdates(Protocol):
    """The engine's side of a weight update. The shell calls one method at a time, except `stop`:

    begin ─▶ is_prepared ─▶ load ─▶ verify ─▶ end          `abort` if the update is aborted
    """

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
