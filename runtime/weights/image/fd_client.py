"""Receives descriptors from the server of a node, and deposits some there for others;
see `fd_server`.

The server keeps a deposit as long as the connection is open, in the depositor or in a child
that it has forked, so nothing has to be cleaned up when they die. Calls raise ConnectionLost if
no server listens or it disconnects, DeadlineExceeded without an answer in time, WeightSyncError
for a refusal.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from umbra.runtime.errors import ConnectionLost, DeadlineExceeded, WeightSyncError
from umbra.runtime.weights.image.fd_server import MAX_FDS, MAX_PACKET_NBYTES, receive_packet

_CLOSE_TIMEOUT_S: Final = 5.0
# A stopped supervisor holds up a rank this long; with less, a busy one may keep memory to be freed.


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
