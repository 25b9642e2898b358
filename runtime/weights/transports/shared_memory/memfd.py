"""Shared memory without a name: memfds whose descriptors are passed over a Unix socket.

The supervisor creates the buckets and serves their descriptors; ranks and engines request one by
name and map it. Only the socket has an entry in a file system, so the memory is freed when the last
process closes it or dies.

    client                       server
      | -- "bucket-0" (1 packet) -> |   peer's uid must be the server's (SO_PEERCRED)
      | <- "ok" + SCM_RIGHTS fd --- |   or a text with the reason of a refusal
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import socket
import struct
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from umbra.runtime.errors import ConnectionLost, DeadlineExceeded, WeightSyncError
from umbra.runtime.weights.transports.shared_memory.pages import populate_mapping

logger = logging.getLogger(__name__)

_MAX_PACKET_NBYTES: Final = 512
_ANSWER_TIMEOUT_S: Final = 5.0
# A client that connects and sends nothing is dropped after this; longer lets it pin a descriptor.
_BACKLOG: Final = 128


def create_buckets(names: Sequence[str], nbytes: int) -> dict[str, int]:
    """Creates memfds of `nbytes` each, close-on-exec, sealed so that nobody can change their size.

    Without seals, a peer that truncates one would kill every process that has it mapped (SIGBUS).
    Memory that is missing at its first use would do the same, so it is allocated now. That blocks:
    160 ms for 64 MiB of memory that a virtual machine has never used. The caller owns the
    descriptors.

    Raises:
        WeightSyncError: the system has no memory or descriptors for them.
    """
    fds: dict[str, int] = {}
    try:
        for name in names:
            fd = fds[name] = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(fd, 0, nbytes)
            fcntl.fcntl(
                fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
    except OSError as error:
        close_fds(fds)
        raise WeightSyncError(
            f"cannot make {len(names)} buckets of {nbytes} bytes: {error}"
        ) from error
    return fds


def close_fds(fds: Mapping[str, int]) -> None:
    for fd in fds.values():
        os.close(fd)


class MappedBucket:
    """The first `nbytes` of a memfd, shared and writable, every page present.

    Owns the mapping, not the fd.

    Views of `memory` keep it mapped: drop them before `close`.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        size_nbytes = os.fstat(fd).st_size
        if size_nbytes < nbytes:
            raise WeightSyncError(f"a bucket has {size_nbytes} bytes, expected {nbytes} or more")
        self.memory = mmap.mmap(fd, nbytes)
        populate_mapping(self.memory)

    def close(self) -> None:
        # A traceback may still hold a view: then the mapping is freed with the view.
        with suppress(BufferError):
            self.memory.close()


class BucketMappings:
    """Keeps the buckets of the last sync mapped, because mapping 64 MiB again costs 5 ms per sync.

    One thread at a time. The memory is shared; it counts as resident in every process.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._buckets: list[MappedBucket] = []

    def open(
        self, socket_path: str, names: Sequence[str], nbytes: int, timeout_s: float
    ) -> list[MappedBucket]:
        """The first `nbytes` of the named buckets, owned by this object. Names are never reused.

        Raises:
            ConnectionLost, DeadlineExceeded, WeightSyncError.
        """
        key = (socket_path, *names, nbytes)
        if key != self._key:
            self.close()
            self._buckets = _open_buckets(socket_path, names, nbytes, timeout_s)
            self._key = key
        return self._buckets

    def close(self) -> None:
        """Unmaps them. Idempotent."""
        for bucket in self._buckets:
            bucket.close()
        self._buckets, self._key = [], ()


def _open_buckets(
    socket_path: str, names: Sequence[str], nbytes: int, timeout_s: float
) -> list[MappedBucket]:
    """Receives and maps the named buckets. No descriptor stays open; the caller closes the maps."""
    deadline = time.monotonic() + timeout_s
    buckets: list[MappedBucket] = []
    try:
        for name in names:
            fd = receive_fd(socket_path, name, max(0.001, deadline - time.monotonic()))
            try:
                buckets.append(MappedBucket(fd, nbytes))
            finally:
                os.close(fd)
    except BaseException:
        for bucket in buckets:
            bucket.close()
        raise
    return buckets


def receive_fd(socket_path: str, name: str, timeout_s: float) -> int:
    """Requests a descriptor from the server at `socket_path`; the caller owns it. Blocks.

    Raises:
        ConnectionLost: no server listens there, or it disconnected.
        DeadlineExceeded: no answer in time.
        WeightSyncError: the server has no such name or refuses.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(timeout_s)
        try:
            client.connect(socket_path)
            client.send(name.encode())
            answer, fds, _, _ = socket.recv_fds(
                client, _MAX_PACKET_NBYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except TimeoutError:
            raise DeadlineExceeded(
                f"no descriptor for {name!r} from {socket_path} within {timeout_s:.3g} s"
            ) from None
        except OSError as error:
            raise ConnectionLost(f"no descriptor server at {socket_path}: {error}") from error
    if len(fds) == 1 and answer == b"ok":
        return fds[0]
    for fd in fds:
        os.close(fd)
    if not answer:
        raise ConnectionLost(f"the descriptor server at {socket_path} closed without an answer")
    raise WeightSyncError(f"no descriptor for {name!r}: {answer.decode(errors='replace')}")


class FdServer:
    """Serves descriptors by name. They may be offered and withdrawn at any time.

    Does not own the descriptors.

    Args:
        socket_path: at which processes of this node reach it.
    """

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self._fds: dict[str, int] = {}

    def offer(self, fds: Mapping[str, int]) -> None:
        self._fds.update(fds)

    def withdraw(self, names: Sequence[str]) -> None:
        for name in names:
            self._fds.pop(name, None)

    async def run(self, listener: socket.socket) -> None:
        """Accepts until cancelled. A client that misbehaves is dropped; the server continues."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as clients:
            while True:
                client, _ = await loop.sock_accept(listener)
                clients.create_task(self._serve_client(client))

    async def _serve_client(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with client:
            client.setblocking(False)
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    request = await loop.sock_recv(client, _MAX_PACKET_NBYTES)
                self._answer(client, request)
            except (OSError, TimeoutError) as error:
                logger.warning("dropped a descriptor client: %s", error or "no request in time")

    def _answer(self, client: socket.socket, request: bytes) -> None:
        credentials = client.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        _, uid, _ = struct.unpack("3i", credentials)
        fd = self._fds.get(request.decode(errors="replace"))
        if uid != os.getuid():
            logger.warning("refused a descriptor to uid %d", uid)
            client.send(b"another user's descriptors are not served")
        elif fd is None:
            client.send(b"no descriptor of that name")
        else:
            socket.send_fds(client, [b"ok"], [fd])


@asynccontextmanager
async def serve_fds(
    socket_path: str, fds: Mapping[str, int] | None = None
) -> AsyncGenerator[FdServer]:
    """Serves descriptors at `socket_path` (mode 0600) inside the block; removes it afterwards."""
    server = FdServer(socket_path)
    server.offer(fds or {})
    with _listen(socket_path) as listener:
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(server.run(listener))
                try:
                    yield server
                finally:
                    task.cancel()
        finally:
            with suppress(FileNotFoundError):
                os.unlink(socket_path)


def _listen(socket_path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.setblocking(False)
        # Linux derives the mode of a bound Unix socket from the descriptor's, less the umask. So
        # others can never connect, not even for a moment, unlike with a chmod after bind.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(socket_path)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
