"""Connections for the weights of one sync: one for each rank and other node.

    rank 0 ═══ receiver of node b      a link is broken by the death of either end, and no other
    rank 0 ═══ receiver of node c      link is disturbed: the nodes that are left get the version
    rank 1 ═══ receiver of node b
    rank 1 ═══ receiver of node c

One larger group would break as a whole, and its members would have to agree on the next one while
the sync is in progress. Links are made for each sync and end with it, so nothing of an aborted sync
reaches the next one, and nothing has to be rebuilt when an engine is replaced or sleeps. torch's
process groups are not used: they meet in a store, which asks a name server for the names of its
clients, and only a timeout ends a wait in gloo.

The receiver connects to the rank (`link_sender`). Each end has a thread, which waits until the
deadline of the sync at most. The thread that owns the sync may close the link at any time, which
wakes both ends.

A rank's link sends its extents first, and then, in the order of `BucketGrid`, its runs of each
bucket: pieces that follow each other there without a gap. The receiver's link writes them into the
image of its node, in the rank's name, and answers the last one. A link that has a base, the
contents of the image, may send a bucket's changes instead (`bucket_deltas`): a frame with the
length of the delta, or 0 if its runs follow, precedes each bucket.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from umbra.runtime.errors import DeadlineExceeded, ProtocolError
from umbra.runtime.weights.image.mapped_image import MappedImage
from umbra.runtime.weights.image.sync_progress import SyncProgress
from umbra.runtime.weights.links.bucket_deltas import apply_delta, most_nbytes
from umbra.runtime.weights.manifest import MAX_TENSORS, BucketGrid, BucketPiece, Extent
from umbra.runtime.weights.shards import buffer_bytes
from umbra.runtime.weights.sync_messages import remaining_s

_LENGTH_NBYTES: Final = 8
_MEETING_LIMIT_S: Final = 10.0
# Time for a receiver to reach its rank. Longer: a rank that cannot be reached holds up the sync.
# Shorter: links fail on a busy machine.

_MAX_FRAME_NBYTES: Final = 255  # has to fit one byte


class _Link:
    """One end. A subclass sends and receives in `_exchange`."""

    def __init__(self) -> None:
        self._connection: LinkConnection | None = None
        self._is_closed = threading.Event()
        self._is_complete = False  # nothing but an answer is left, which `close` does not end

    def run(self, connection: LinkConnection) -> None:
        """Runs the link in this thread until everything was exchanged. Closes the connection."""
        try:
            with closing(connection):
                self._connection = connection
                self._check_open()  # after `close` may look for the connection
                self._exchange(connection)
        except Exception as error:  # noqa: BLE001 - of sockets and torch
            self._on_error(error)

    def _break(self) -> None:
        self._is_closed.set()
        if self._connection is not None and not self._is_complete:
            self._connection.interrupt()

    def _exchange(self, connection: LinkConnection) -> None:
        raise NotImplementedError

    def _on_error(self, error: Exception) -> None:
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._is_closed.is_set() and not self._is_complete:
            raise ConnectionAbortedError("the link was closed before everything had arrived")


class _Bucket(NamedTuple):
    """A bucket's payload: its delta if available, else its full data."""

    runs: Sequence[Tensor]
    delta: Tensor | None


class SendingLink(_Link):
    """A rank's end. A `LinkListener` runs it. `changed` is notified after every bucket and error.

    Args:
        base: contents of the image that deltas are for; "" for one that gets whole buckets.

    Attributes:
        num_sent: buckets whose runs have been sent, and after the last one have arrived; read
            it under `changed`.
        error: why the link is broken; "" while it works.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        num_buckets: int,
        changed: threading.Condition,
        *,
        base: str = "",
    ) -> None:
        self.num_sent = 0
        self.sent_nbytes = 0
        self._base = base
        self.error = ""
        self._extents = extents
        self._num_buckets = num_buckets
        self._changed = changed
        self._buckets: queue.SimpleQueue[_Bucket | None] = queue.SimpleQueue()
        super().__init__()

    def put(self, runs: Sequence[Tensor], delta: Tensor | None = None) -> None:
        """Queues the runs of the next bucket, uint8 [nbytes] each, and its delta from the
        base, uint8 [nbytes], which a link with a base sends instead. They must not change
        until they were sent."""
        self._buckets.put(_Bucket(runs, delta if self._base else None))

    def close(self, reason: str = "it was closed") -> None:
        """Ends the link, even if not everything was sent. Idempotent."""
        with self._changed:
            self.error = self.error or reason
        self._buckets.put(None)
        self._break()

    def _exchange(self, connection: LinkConnection) -> None:
        connection.send_frame(self._base.encode())
        rows = torch.tensor([(e.offset, e.nbytes) for e in self._extents], dtype=torch.int64)
        connection.send(len(rows).to_bytes(_LENGTH_NBYTES))
        if len(rows):
            connection.send(_memory(rows))
        for idx in range(self._num_buckets):
            bucket = self._buckets.get()
            if bucket is None or self.error:
                return
            if self._base:
                delta_nbytes = 0 if bucket.delta is None else len(bucket.delta)
                connection.send_frame(delta_nbytes.to_bytes(_LENGTH_NBYTES))
            sent = bucket.runs if bucket.delta is None else [bucket.delta]
            for data in sent:
                connection.send(_memory(data.cpu()))
            self.sent_nbytes += sum(len(data) for data in sent)
            if idx == self._num_buckets - 1:
                # A connection that is closed too early may lose what it still carries.
                connection.receive_frame()
            with self._changed:
                self.num_sent += 1
                self._changed.notify_all()

    def _on_error(self, error: Exception) -> None:
        with self._changed:
            self.error = self.error or str(error)
            self._changed.notify_all()


class ReceivingLink(_Link):
    """A receiver's end, which fills the image of its node with one rank's shards. It connects to
    the rank's `LinkListener` at `endpoint`, "HOST:PORT"."""

    def __init__(self, receiver: NodeReceiver, rank: int, endpoint: str) -> None:
        self._receiver = receiver
        self._rank = rank
        self._writing = threading.Lock()
        super().__init__()
        args = (endpoint,)
        threading.Thread(target=self._open, args=args, name="weight-link", daemon=True).start()

    def close(self) -> None:
        """Ends the link, unless all has arrived. Afterwards nothing more is written to the image,
        and a second call does nothing."""
        self._break()
        with self._writing:
            pass

    def _open(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        try:
            limit_s = min(remaining_s(self._receiver.deadline), _MEETING_LIMIT_S)
            stream = socket.create_connection((host, int(port)), limit_s)
        except (OSError, DeadlineExceeded) as error:
            self._on_error(error)
        else:
            self.run(LinkConnection(stream, self._receiver.deadline))

    def _exchange(self, connection: LinkConnection) -> None:
        receiver, grid = self._receiver, self._receiver.grid
        connection.send_frame(receiver.key.encode())
        base = connection.receive_frame().decode()
        if base and base != receiver.holds:
            raise ProtocolError(
                f"rank {self._rank} sends what has changed since {base}, but the image holds "
                f"{receiver.holds or 'nothing complete'}"
            )
        image = buffer_bytes(receiver.image.memory)
        for idx, pieces in enumerate(grid.cut(self._receive_extents(connection))):
            window = grid.window(idx)
            receiver.image.make_present(window)
            memory = image[window]
            delta = self._receive_delta(connection, len(memory)) if base else None
            with self._writing:
                self._check_open()
                if delta is None:
                    for start, stop in byte_runs(pieces):
                        connection.receive(_memory(memory[start:stop]))
                else:
                    apply_delta(memory, delta)
            if idx == grid.num_buckets - 1:
                self._is_complete = True  # the engine may close the link once this one is filled
            receiver.progress.set_filled(self._rank, idx + 1)
        connection.send_frame(b"")

    def _receive_delta(self, connection: LinkConnection, bucket_nbytes: int) -> Tensor | None:
        nbytes = int.from_bytes(connection.receive_frame())
        if nbytes > most_nbytes(bucket_nbytes):
            raise ProtocolError(f"a delta of {nbytes} bytes for a bucket of {bucket_nbytes}")
        if not nbytes:
            return None
        delta = torch.empty(nbytes, dtype=torch.uint8)
        connection.receive(_memory(delta))
        return delta

    def _receive_extents(self, connection: LinkConnection) -> list[Extent]:
        length = bytearray(_LENGTH_NBYTES)
        connection.receive(memoryview(length))
        count = int.from_bytes(length)
        if count > MAX_TENSORS:
            raise ProtocolError(f"a rank holds at most {MAX_TENSORS} tensors, got {count}")
        rows = torch.zeros(count, 2, dtype=torch.int64)
        if count:
            connection.receive(_memory(rows))
        numbers: list[list[int]] = rows.numpy().tolist()
        end, image_nbytes = 0, self._receiver.grid.image_nbytes
        for offset, nbytes in numbers:
            if offset < end or nbytes < 1 or offset + nbytes > image_nbytes:
                raise ProtocolError(
                    f"a rank holds bytes [{offset}, {offset + nbytes}) of the image, after byte "
                    f"{end} of {image_nbytes}"
                )
            end = offset + nbytes
        return [Extent(key, offset, nbytes) for key, (offset, nbytes) in enumerate(numbers)]

    def _on_error(self, error: Exception) -> None:
        self._receiver.fail(self._rank, error)


def byte_runs(pieces: Sequence[BucketPiece]) -> list[tuple[int, int]]:
    """The first byte of each run of pieces in their bucket, and the byte behind it. Gaps are not
    sent, because they may belong to another rank. Most tensors have a multiple of `ALIGNMENT` bytes
    and leave none."""
    runs: list[tuple[int, int]] = []
    for piece in pieces:
        start, stop = piece.bucket_start, piece.bucket_start + piece.nbytes
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, stop))
    return runs


def _memory(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()  # whose types do not say that it is a buffer
    return memoryview(array).cast("B")


class LinkConnection:
    """The TCP connection of a link's two ends. Owns the socket.

    One thread sends and receives, until `deadline`; any thread may interrupt it. Calls raise
    DeadlineExceeded or TimeoutError after the deadline, OSError if the other end is gone, or either
    end interrupted the connection.
    """

    def __init__(self, stream: socket.socket, deadline: float) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.deadline = deadline
        self._stream = stream
        self._lock = threading.Lock()  # a descriptor that was closed may be another file's by now

    def send(self, data: bytes | memoryview) -> None:
        self._stream.settimeout(remaining_s(self.deadline))
        self._stream.sendall(data)

    def receive(self, target: memoryview) -> None:
        """Fills `target`, the bytes of a buffer."""
        while target:
            self._stream.settimeout(remaining_s(self.deadline))
            num_received = self._stream.recv_into(target)
            if num_received == 0:
                raise ConnectionResetError("the other end closed the connection")
            target = target[num_received:]

    def send_frame(self, data: bytes) -> None:
        assert len(data) <= _MAX_FRAME_NBYTES, len(data)
        self.send(bytes([len(data)]) + data)

    def receive_frame(self) -> bytes:
        return bytes(self._receive_bytes(self._receive_bytes(1)[0]))

    def interrupt(self) -> None:
        """Ends both ends' waits. Idempotent."""
        with self._lock, suppress(OSError):  # it is closed, or the other end was faster
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Sent data arrives if the receive buffer is empty. Idempotent."""
        with self._lock:
            self._stream.close()

    def _receive_bytes(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        self.receive(memoryview(data))
        return data


class NodeReceiver:
    """Between nodes, an engine's part: fills the image of its node for the ranks of other nodes,
    until `close`. Owns the links and their mapping of the control block. `on_error` is called in
    the thread of a link that has failed.

    Attributes:
        error: why the first link that failed did; "" while all work.
        key: opens the ranks' listeners.
        holds: contents of the image, which deltas are for; "" for none.
        deadline: of the sync, on the monotonic clock.
    """

    def __init__(
        self,
        image: MappedImage,
        grid: BucketGrid,
        wire: Mapping[str, Any],
        timeout_s: float,
        on_error: Callable[[], None],
    ) -> None:
        receives: Mapping[str, Any] = wire["receives"]
        self.error = ""
        self.image = image
        self.grid = grid
        self.key: str = receives["key"]
        self.holds: str = receives["holds"]
        self.deadline = time.monotonic() + float(wire["progress"]["timeout_s"])
        self.progress = SyncProgress.receive(wire["fd_socket"], wire["progress"], timeout_s)
        self._on_error = on_error
        self._lock = threading.Lock()
        self._links = [ReceivingLink(self, rank, endpoint) for rank, endpoint in receives["ranks"]]

    def close(self) -> None:
        """Ends the links. Nothing is written to the image any more when it returns."""
        for link in self._links:
            link.close()
        self.progress.close()

    def fail(self, rank: int, error: Exception) -> None:
        """The link from `rank` has failed; called in its thread."""
        with self._lock:
            if not self.error:
                num_filled, total = self.progress.num_filled()[rank], self.grid.num_buckets
                self.error = (
                    f"bucket {num_filled} of {total} did not arrive from rank {rank}: {error}"
                )
        self._on_error()
