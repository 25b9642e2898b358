"""The engine's end of a weight update, as the shell sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class WeightUpdates(Protocol):
    """Takes new weights. The shell calls one method after the other, `stop` excepted:

    begin ─▶ load ─▶ finish ─▶ end          `end` alone where the update is given up
    """

    async def begin(self, manifest: Mapping[str, Any], buckets: Mapping[str, Any]) -> None:
        """Gets ready for one version; arguments and errors as of `Engine.begin_update`."""
        ...

    async def load(self) -> int:
        """Takes all weights as the ranks bring them; their bytes. When it returns, the engine has
        the new weights.

        Raises:
            WeightSyncError: the sync was given up, or `stop` was called.
        """
        ...

    async def finish(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        """Verifies what was loaded; see `Engine.finish_update`."""
        ...

    def stop(self) -> None:
        """Ends a `load` that waits for ranks."""
        ...

    async def end(self) -> None:
        """Leaves the update, committed or given up. Idempotent."""
        ...

    async def release(self) -> None:
        """The engine goes to sleep: leaves the update, and frees what serves the next one."""
        ...

    async def close(self) -> None:
        """The engine ends; `load` may still be under way. Frees all. Idempotent."""
        ...
