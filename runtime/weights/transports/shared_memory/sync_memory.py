"""The shared memory of a pool's syncs: one set of buckets, and a control block for each sync."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.manifest import align
from umbra.runtime.weights.transports.shared_memory.bucket_grid import NUM_BUFFERS
from umbra.runtime.weights.transports.shared_memory.memfd import FdServer, close_fds, create_buckets
from umbra.runtime.weights.transports.shared_memory.sync_progress import SyncProgress


class SyncMemory:
    """Owned by a pool's coordinator, which makes and closes it. Names are never reused, because
    peers keep what they have mapped.

    Args:
        bucket_nbytes: size of each of the NUM_BUFFERS buckets, before rounding up.
        fd_server: offers the descriptors.
    """

    def __init__(self, pool: str, bucket_nbytes: int, fd_server: FdServer) -> None:
        self.bucket_nbytes = align(bucket_nbytes)
        self._pool = pool
        self._fd_server = fd_server
        self._fds: dict[str, int] = {}
        self._why_none = ""

    async def make(self) -> None:
        """Makes the buckets, in a thread, unless they exist. `names` reports a failure."""
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
        """The names of the buckets.

        Raises:
            WeightSyncError: the system had no memory or descriptors for them.
        """
        if not self._fds:
            raise WeightSyncError(self._why_none)
        return list(self._fds)

    @contextmanager
    def progress(
        self, num_ranks: int, num_engines: int
    ) -> Generator[tuple[dict[str, Any], SyncProgress]]:
        """A control block for one sync, offered inside the block; first what ranks and engines need
        to map it.

        Raises:
            WeightSyncError: the system has no memory or descriptors for it.
        """
        name = f"{self._pool}-{secrets.token_hex(4)}-progress"
        fd, progress = SyncProgress.create(name, num_ranks, num_engines)
        self._fd_server.offer({name: fd})
        wire = {"name": name, "num_ranks": num_ranks, "num_engines": num_engines}
        try:
            yield {"fd_socket": self._fd_server.socket_path, "progress": wire}, progress
        finally:
            self._fd_server.withdraw([name])
            progress.close()
            os.close(fd)

    def close(self) -> None:
        """Closes the buckets, which are freed once nobody has them mapped. Idempotent."""
        self._fd_server.withdraw(list(self._fds))
        close_fds(self._fds)
        self._fds = {}


def numbered(details: Mapping[str, Any], num_engines: int) -> dict[int, Mapping[str, Any]]:
    """The details for each engine of one control block, with its number there."""
    progress = details["progress"]
    return {
        number: {**details, "progress": progress | {"engine": number}}
        for number in range(num_engines)
    }
