"""The memory that a pool's syncs travel through: buckets for all of them, a control block each."""

from __future__ import annotations

import asyncio
import os
import secrets
from contextlib import suppress

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.manifest import align
from umbra.runtime.weights.transports.shared_memory.bucket_grid import NUM_BUFFERS
from umbra.runtime.weights.transports.shared_memory.memfd import FdServer, close_fds, create_buckets
from umbra.runtime.weights.transports.shared_memory.sync_progress import SyncProgress


class SyncMemory:
    """Owned by a pool's coordinator, which makes and closes it. Names are for ever: peers keep what
    they have mapped.

    Args:
        bucket_nbytes: of each of the NUM_BUFFERS buckets; it is rounded up.
        fd_server: where the descriptors are offered.
    """

    def __init__(self, pool: str, bucket_nbytes: int, fd_server: FdServer) -> None:
        self.bucket_nbytes = align(bucket_nbytes)
        self._pool = pool
        self._fd_server = fd_server
        self._fds: dict[str, int] = {}
        self._progress: tuple[str, int, SyncProgress] | None = None  # name, descriptor, mapping
        self._why_none = ""

    async def make(self) -> None:
        """Makes the buckets, in a thread, unless they are there. Failing is told by `names`."""
        if self._fds:
            return
        token = secrets.token_hex(4)
        names = [f"{self._pool}-{token}-{idx}" for idx in range(NUM_BUFFERS)]
        making = asyncio.get_running_loop().run_in_executor(
            None, create_buckets, names, self.bucket_nbytes
        )
        try:
            self._fds = await asyncio.shield(making)
        except WeightSyncError as error:
            self._why_none = str(error)
        except asyncio.CancelledError:
            with suppress(WeightSyncError):
                close_fds(await making)
            raise
        self._fd_server.offer(self._fds)

    def names(self) -> list[str]:
        """The buckets.

        Raises:
            WeightSyncError: the system had no memory or descriptors for them.
        """
        if not self._fds:
            raise WeightSyncError(self._why_none)
        return list(self._fds)

    def open_progress(self, num_ranks: int, num_engines: int) -> tuple[str, SyncProgress]:
        """A control block for the sync that is open, offered until `close_progress`.

        Raises:
            WeightSyncError: the system has no memory or descriptors for it.
        """
        name = f"{self._pool}-{secrets.token_hex(4)}-progress"
        fd, progress = SyncProgress.create(name, num_ranks, num_engines)
        self._progress = (name, fd, progress)
        self._fd_server.offer({name: fd})
        return name, progress

    def close_progress(self) -> None:
        """Idempotent."""
        if self._progress is not None:
            name, fd, progress = self._progress
            self._progress = None
            self._fd_server.withdraw([name])
            progress.close()
            os.close(fd)

    def close(self) -> None:
        """The buckets are freed once nobody has them mapped. Idempotent."""
        self._fd_server.withdraw(list(self._fds))
        close_fds(self._fds)
        self._fds = {}
