"""Passes descriptors between the processes of a node, over a Unix socket of its supervisor.

The supervisor offers descriptors of shared memory, which ranks and engines request by name:

    client                           server
      | -- "get NAME" (1 packet) ----> |   peer's uid must be the server's (SO_PEERCRED)
      | <- "ok" + SCM_RIGHTS fd ------ |   or a text with the reason of a refusal

A rank also deposits descriptors of its own, which engines receive in portions. The
connection owns them:

    rank                             server
      | -- "keep NAME" + fds ------> |   once for each portion
      | <- "ok" -------------------- |   or a refusal, and the server closes all of this connection
      | -- end of the connection --> |   also when the rank dies, and no child has it open, too:
      |                              |   the server closes them
    engine
      | -- "fetch IDX NAME" -------> |   one connection for each portion
      | <- "ok" + fds from IDX on -- |

Calls of clients raise ConnectionLost if no server listens or it disconnects, DeadlineExceeded
without an answer in time, WeightSyncError for a refusal.
"""

from __future__ import annotations

import array
import asyncio
import errno
import logging
import os
import resource
import socket
import struct
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final, NamedTuple

from umbra.runtime.errors import ConnectionLost, DeadlineExceeded, WeightSyncError

logger = logging.getLogger(__name__)

MAX_FDS: Final = 253
"""Descriptors in one packet; Linux allows no more (SCM_MAX_FD)."""
MAX_PACKET_NBYTES: Final = 512
_ANSWER_TIMEOUT_S: Final = 5.0
# A client that connects and sends nothing is dropped after this; longer lets it pin a descriptor.
_BACKLOG: Final = 128
_ACCEPT_PAUSE_S: Final = 0.1
# Pause before the server accepts again, when it may open no more files. A longer one delays
# clients; with a shorter one, a server whose files are all in use fills its log.
_MAX_DEPOSITED_SHARE: Final = 0.5
# Share of the descriptors that the server's process may open. With more, deposits could take those
# that it needs for connections and logs; with less, large models are refused that would fit.
_CLOSE_TIMEOUT_S: Final = 5.0
# A stopped supervisor holds up a rank this long; with less, a busy one may keep memory to be freed.


class Packet(NamedTuple):
    """One packet; empty `text` is the end of the connection. The receiver owns `fds`. `is_cut`: it
    was too long, or this process may not open all of its descriptors."""

    text: bytes
    fds: list[int]
    is_cut: bool


def receive_packet(peer: socket.socket, max_fds: int) -> Packet:
    """The next packet, with close-on-exec descriptors. Raises OSError as `socket.recvmsg`. In
    Python 3.11, `socket.recv_fds` ignores its flags: programs that this process starts would
    inherit the descriptors."""
    received = array.array("i")
    text, ancillary, flags, _ = peer.recvmsg(
        MAX_PACKET_NBYTES,
        socket.CMSG_LEN(max_fds * received.itemsize),
        socket.MSG_CMSG_CLOEXEC,
    )
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
    is_cut = bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))
    return Packet(text, received.tolist(), is_cut)


class FdServer:
    """Serves descriptors by name. Owns deposited ones, as long as their client stays connected."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self._fds: dict[str, int] = {}
        self._deposits: dict[str, list[int]] = {}

    @property
    def num_deposited(self) -> int:
        return sum(map(len, self._deposits.values()))

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
                try:
                    client, _ = await loop.sock_accept(listener)
                except OSError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE):
                        raise
                    logger.warning("cannot accept a descriptor client: %s", error)
                    await asyncio.sleep(_ACCEPT_PAUSE_S)  # there is no event for a free descriptor
                else:
                    clients.create_task(self._serve_client(client))

    async def _serve_client(self, client: socket.socket) -> None:
        received: list[int] = []
        with client:
            client.setblocking(False)
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    packet = await _receive(client, received)
                verb, _, rest = packet.text.decode(errors="replace").partition(" ")
                if not _is_of_this_user(client):
                    client.send(b"another user's descriptors are not served")
                elif verb == "keep":
                    await self._keep(client, rest, packet, received)
                elif verb == "fetch":
                    self._send_deposited(client, rest)
                else:
                    self._send_offered(client, verb, rest)
            except (OSError, TimeoutError) as error:
                logger.warning(
                    "dropped a descriptor client: %s", str(error) or "no request in time"
                )
            finally:
                for fd in received:
                    os.close(fd)

    async def _keep(
        self, client: socket.socket, name: str, packet: Packet, received: list[int]
    ) -> None:
        request = packet.text
        try:
            while packet.text:
                problem = self._find_problem(name, received, packet, request)
                if problem:
                    client.send(problem.encode())
                    return
                self._deposits[name] = received
                client.send(b"ok")
                packet = await _receive(client, received)
        finally:
            if self._deposits.get(name) is received:
                del self._deposits[name]

    def _find_problem(self, name: str, received: list[int], packet: Packet, request: bytes) -> str:
        """Why a packet of a deposit is refused, or "". `request` is the client's first packet."""
        if packet.is_cut:
            return "the descriptors did not arrive: the server may not open that many"
        if not name or not packet.fds or packet.text != request:
            return "a deposit is one or more descriptors under one name"
        if name in self._fds or self._deposits.get(name, received) is not received:
            return "the name is in use"
        others = [fds for fds in self._deposits.values() if fds is not received]
        num_files = sum(len(fds) + 1 for fds in (*others, received))  # a connection is one, too
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if num_files > limit * _MAX_DEPOSITED_SHARE:
            return (
                f"deposits would take {num_files}, more than half of the {limit} files that the "
                "server may open: raise the hard limit of open files (ulimit -Hn)"
            )
        return ""

    def _send_offered(self, client: socket.socket, verb: str, name: str) -> None:
        fd = self._fds.get(name)
        if verb != "get" or fd is None:
            client.send(b"no descriptor of that name")
        else:
            socket.send_fds(client, [b"ok"], [fd])

    def _send_deposited(self, client: socket.socket, wanted: str) -> None:
        idx, _, name = wanted.partition(" ")
        fds: list[int] = []
        if idx.isdecimal() and len(idx) < 10:
            fds = self._deposits.get(name, [])[int(idx) :][:MAX_FDS]
        if fds:
            socket.send_fds(client, [b"ok"], fds)
        else:
            client.send(b"no deposited descriptors of that name")


async def _receive(client: socket.socket, received: list[int]) -> Packet:
    """The next packet. Its descriptors are also appended to `received`, whose owner closes them."""
    while True:
        await _readable(client)
        with suppress(BlockingIOError):
            packet = receive_packet(client, MAX_FDS)
            received.extend(packet.fds)
            return packet


async def _readable(client: socket.socket) -> None:
    loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(client, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(client)


def _is_of_this_user(client: socket.socket) -> bool:
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid != os.getuid():
        logger.warning("refused a descriptor to uid %d", uid)
    return uid == os.getuid()


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


@contextmanager
def received_fd(socket_path: str, name: str, timeout_s: float) -> Generator[int]:
    """Requests an offered descriptor, open within the block. Blocks."""
    with _received(socket_path, f"get {name}", 1, timeout_s) as (fd,):
        yield fd


@contextmanager
def received_deposit(
    socket_path: str, name: str, first_idx: int, num_fds: int, timeout_s: float
) -> Generator[list[int]]:
    """Requests at most `MAX_FDS` descriptors of a deposit, open within the block. Blocks."""
    with _received(socket_path, f"fetch {first_idx} {name}", num_fds, timeout_s) as fds:
        yield fds


class FdDeposit:
    """A deposit under a name not in use at the server. Owns the connection, with which
    it ends. Blocks."""

    def __init__(self, socket_path: str, name: str, timeout_s: float) -> None:
        self._path = socket_path
        self._name = name
        self._timeout_s = timeout_s
        self._client = _connect(socket_path, timeout_s)

    def add(self, fds: Sequence[int]) -> None:
        """Passes at most `MAX_FDS` descriptors. After a refusal, the server has
        closed all of them."""
        with _errors_of(self._path, self._timeout_s):
            socket.send_fds(self._client, [f"keep {self._name}".encode()], fds)
            answer = self._client.recv(MAX_PACKET_NBYTES)
        if not answer:
            raise ConnectionLost(f"the descriptor server at {self._path} closed the connection")
        if answer != b"ok":
            reason = answer.decode(errors="replace")
            raise WeightSyncError(f"cannot deposit {len(fds)} descriptors: {reason}")

    @property
    def is_kept(self) -> bool:
        """Whether the server still has the connection, which a restarted server has not."""
        try:
            self._client.settimeout(0.0)
            try:
                return bool(self._client.recv(1, socket.MSG_PEEK))
            finally:
                self._client.settimeout(self._timeout_s)
        except BlockingIOError:
            return True
        except OSError:
            return False

    def end(self) -> None:
        """Does not wait until the server has closed its descriptors. Idempotent."""
        with suppress(OSError):
            self._client.shutdown(socket.SHUT_WR)  # a child that was forked may have it open, too

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Ends the deposit, and waits for the server to close its descriptors. Idempotent."""
        self.end()
        with suppress(OSError):
            self._client.settimeout(timeout_s)  # of each answer; there is at most one
            while self._client.recv(MAX_PACKET_NBYTES):  # an answer that `add` did not wait for
                pass  # the server disconnects last
        self._client.close()


def close_deposits(deposits: Sequence[FdDeposit]) -> None:
    """Closes all of them within the time for one."""
    for deposit in deposits:
        deposit.end()
    deadline = time.monotonic() + _CLOSE_TIMEOUT_S
    for deposit in deposits:
        deposit.close(max(0.001, deadline - time.monotonic()))


@contextmanager
def _received(
    socket_path: str, request: str, num_fds: int, timeout_s: float
) -> Generator[list[int]]:
    fds: list[int] = []
    try:
        with _errors_of(socket_path, timeout_s), _connect(socket_path, timeout_s) as client:
            client.send(request.encode())
            answer, fds, is_cut = receive_packet(client, MAX_FDS)
        if not answer:
            raise ConnectionLost(f"the descriptor server at {socket_path} closed without an answer")
        if answer != b"ok":
            raise WeightSyncError(f"{request!r}: {answer.decode(errors='replace')}")
        if is_cut:
            raise WeightSyncError(
                f"{len(fds)} of {num_fds} descriptors arrived: this process may not open more "
                "files (ulimit -n)"
            )
        if len(fds) < num_fds:
            raise WeightSyncError(f"{request!r}: {num_fds - len(fds)} descriptors are missing")
        yield fds[:num_fds]
    finally:
        for fd in fds:
            os.close(fd)


def _connect(socket_path: str, timeout_s: float) -> socket.socket:
    with _errors_of(socket_path, timeout_s):
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            client.settimeout(timeout_s)
            client.connect(socket_path)
        except BaseException:
            client.close()
            raise
    return client


@contextmanager
def _errors_of(socket_path: str, timeout_s: float) -> Generator[None]:
    try:
        yield
    except TimeoutError:
        raise DeadlineExceeded(
            f"no answer of the descriptor server at {socket_path} within {timeout_s:.3g} s"
        ) from None
    except OSError as error:
        raise ConnectionLost(f"no descriptor server at {socket_path}: {error}") from error
