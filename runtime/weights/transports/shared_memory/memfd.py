"""Shared memory without a name: memfds whose descriptors are passed over a Unix socket.

The supervisor creates the memory and serves its descriptors; ranks and engines request one by name
and map it. Only the socket has an entry in a file system, so the memory is freed when the last
process closes it or dies.

    client                       server
      | -- "image" (1 packet) ----> |   peer's uid must be the server's (SO_PEERCRED)
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
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

from umbra.runtime.errors import ConnectionLost, DeadlineExceeded, WeightSyncError

logger = logging.getLogger(__name__)

_MAX_PACKET_NBYTES: Final = 512
_ANSWER_TIMEOUT_S: Final = 5.0
# A client that connects and sends nothing is dropped after this; longer lets it pin a descriptor.
_BACKLOG: Final = 128


def create_memory(name: str, nbytes: int, *, is_allocated: bool = True) -> int:
    """Creates a memfd of `nbytes`, close-on-exec, sealed so that nobody can change its size.

    Without seals, a peer that truncates it would kill every process that has it mapped (SIGBUS).
    The caller owns the descriptor.

    Args:
        is_allocated: the memory is allocated now, because memory that is missing at its first use
            would also kill. That blocks: 160 ms for 64 MiB that a virtual machine has never used.
            False: whoever writes to it allocates it (`populate_mapping`).

    Raises:
        WeightSyncError: the system has no memory or descriptor for it.
    """
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        if is_allocated:
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.ftruncate(fd, nbytes)
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise WeightSyncError(f"cannot make {nbytes} bytes of shared memory: {error}") from error
    return fd


def map_memory(fd: int, nbytes: int) -> mmap.mmap:
    """The first `nbytes` of a memfd, shared and writable.

    Raises:
        WeightSyncError: it is smaller, or the process has no address space or descriptor for it.
    """
    size_nbytes = os.fstat(fd).st_size
    if size_nbytes < nbytes:
        raise WeightSyncError(f"shared memory has {size_nbytes} bytes, expected {nbytes} or more")
    try:
        return mmap.mmap(fd, nbytes)
    except OSError as error:
        raise WeightSyncError(f"cannot map {nbytes} bytes of shared memory: {error}") from error


def unmap(memory: mmap.mmap) -> None:
    """Idempotent. If something still has a view, such as a traceback, it is unmapped with that."""
    with suppress(BufferError):
        memory.close()


@contextmanager
def received_fd(socket_path: str, name: str, timeout_s: float) -> Generator[int]:
    """Requests a descriptor from the server at `socket_path`, open within the block. Blocks.

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
    try:
        if len(fds) == 1 and answer == b"ok":
            yield fds[0]
            return
    finally:
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
