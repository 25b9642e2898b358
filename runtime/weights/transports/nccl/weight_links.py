"""Connections for the weights of one sync: one of two members for each rank and other node.

    rank 0 ═══ receiver of node b      a link is broken by the death of either end, and no other
    rank 0 ═══ receiver of node c      link is disturbed: the nodes that are left get the version
    rank 1 ═══ receiver of node b
    rank 1 ═══ receiver of node c

One larger group would break as a whole, and its members would have to agree on the next one while
the sync is in progress. Links are made for each sync and end with it. So nothing of an aborted sync
reaches the next one, and nothing has to be rebuilt when an engine is replaced or sleeps.

A link uses NCCL if the tensors of its two ends are on different GPUs, and gloo otherwise
(`link_pairs`). Through the store, each end tells the other which GPU that is.

What gloo does (torch 2.13): if a peer is killed, whoever sends to it or waits for it gets a
RuntimeError at once. If a peer is stopped, they wait. A wait that times out breaks its group, and
nothing else ends it: `abort` of a group does not, and a timeout is the only way to look whether it
is done. So every link has a thread that waits in gloo until the deadline of the sync, while the
thread that owns the sync can leave at any time. The other end notices when the thread frees the
group, which closes the connection. With NCCL the thread looks whether a transfer is done, and also
ends as soon as the link is closed or NCCL reports that the peer has failed.

A rank's link sends its extents first, and then, in the order of `BucketGrid`, its runs of each
bucket: pieces that follow each other there without a gap. The receiver's link writes them into the
ring of its node, in the rank's name, and answers the last one.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor

from umbra.runtime.errors import ProtocolError
from umbra.runtime.weights.manifest import MAX_TENSORS
from umbra.runtime.weights.sync_calls import remaining_s
from umbra.runtime.weights.transports.nccl.link_pairs import (
    HOST,
    GlooPair,
    LinkPair,
    NcclPair,
    device_key,
)
from umbra.runtime.weights.transports.shared_memory.bucket_grid import (
    BucketGrid,
    BucketPiece,
    Extent,
)
from umbra.runtime.weights.transports.shared_memory.sync_progress import SyncProgress

logger = logging.getLogger(__name__)

_c10d: Any = torch.distributed  # which exports these classes without declaring it
_SENDER: Final = 0  # members of a link's pair
_RECEIVER: Final = 1
_FIRST_LOOK_S: Final = 0.005
_LAST_LOOK_S: Final = 0.1
# Time between two looks whether the other end has come, which doubles. A wait in the store could
# not be ended. All links look at one store.
_CLIENT_LIMIT_S: Final = 0.5
# For the first attempt to connect to the store, after which it may have been closed; the next ones
# take twice as long, for busy machines.
_MEETING_LIMIT_S: Final = 10.0
# For each step of two ends that are both there. Longer: an engine that dies in these milliseconds
# holds a thread of each rank. Shorter: links fail on a busy machine.


_END_LIMIT_S: Final = 5.0
# For freeing a group, which takes milliseconds.


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """Where the two ends of a link meet.

    Attributes:
        store: "HOST:PORT" of rank 0's TCPStore, as both ends reach it.
        key: prefix in the store, of this link alone.
    """

    store: str
    key: str


def open_store(host: str) -> tuple[Any, str]:
    """A store that listens at the address `host` only; returns it with its "HOST:PORT".

    Its protocol is plain text without any check of who asks. It holds the endpoints of links and
    nothing else, and lives as long as one sync.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family, backlog=512) as listener:
        port = int(listener.getsockname()[1])
        store = _c10d.TCPStore(
            host,
            port,
            None,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, f"{host}:{port}"


class _Link:
    """The thread of one end. A subclass says what it does in `_run`, with the pair it gets there.

    Args:
        device: of the tensors at this end.
    """

    def __init__(
        self, address: LinkAddress, member: int, deadline: float, device: torch.device
    ) -> None:
        self._address = address
        self._member = member
        self._deadline = deadline
        self._device = device
        self._is_closed = threading.Event()
        self._is_complete = False  # nothing but a last flush is left, which `close` does not end
        self._thread = threading.Thread(target=self._main, name="weight-link", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        pair: LinkPair | None = None
        try:
            pair = self._meet()
            self._run(pair)
            pair.flush()
        except Exception as error:  # noqa: BLE001 - gloo raises RuntimeError for everything
            self._on_error(error)
        finally:
            if pair is not None:
                pair.close()  # so that the other end notices

    def wait_ended(self) -> None:
        """Waits a moment for the thread of a link that has nothing left to do. A process that ends
        while the thread frees its group is aborted: "terminate called without an active exception".
        """
        self._thread.join(_END_LIMIT_S)

    def _run(self, pair: LinkPair) -> None:
        raise NotImplementedError

    def _on_error(self, error: Exception) -> None:
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._is_closed.is_set() and not self._is_complete:
            raise ConnectionAbortedError("the link was closed before everything had arrived")

    def _meet(self) -> LinkPair:
        """The connection with the other end, once that is there. It is made of gloo's own class or
        NCCL's own calls: torch's default group is not touched, and nothing watches it."""
        own_address, client = self._connect_store()
        store = _c10d.PrefixStore(self._address.key, client)
        own_key, other = device_key(self._device), f"member{1 - self._member}"
        store.set(f"member{self._member}", f"gpu {own_key}")
        interval_s = _FIRST_LOOK_S
        while not store.check([other]):
            remaining_s(self._deadline)
            if self._is_closed.wait(interval_s):
                raise ConnectionAbortedError("the link was closed before the other end came")
            interval_s = min(2 * interval_s, _LAST_LOOK_S)
        other_key = store.get(other).decode().removeprefix("gpu ")
        limit_s, deadline = self._limit_s(), self._deadline
        if own_key and other_key and own_key != other_key:
            logger.debug("link %s uses NCCL", self._address.key)
            return NcclPair(store, self._member, self._device, limit_s, deadline, self._check_open)
        return GlooPair(store, self._member, own_address, limit_s, deadline)

    def _connect_store(self) -> tuple[str, Any]:
        """The address of this end, as the store sees it, and a client of the store."""
        host, _, port = self._address.store.rpartition(":")
        client_limit_s = _CLIENT_LIMIT_S
        while True:
            # A store that is gone is refused here at once. Its client tries for the whole time.
            with socket.create_connection((host, int(port)), self._limit_s()) as probe:
                own_address = str(probe.getsockname()[0])
            limit = timedelta(seconds=min(self._limit_s(), client_limit_s))
            try:
                client = _c10d.TCPStore(host, int(port), None, False, limit, wait_for_workers=False)
            except _c10d.DistError:
                client_limit_s *= 2
                continue
            client.set_timeout(timedelta(seconds=self._limit_s()))
            return own_address, client

    def _limit_s(self) -> float:
        return min(remaining_s(self._deadline), _MEETING_LIMIT_S)


class SendingLink(_Link):
    """A rank's end. `changed` is notified after every bucket and at an error.

    Attributes:
        num_sent: buckets whose runs have been sent, and after the last one have arrived; read it
            under `changed`.
        error: why the link is broken; "" while it works.
    """

    def __init__(
        self,
        address: LinkAddress,
        extents: Sequence[Extent],
        num_buckets: int,
        deadline: float,
        changed: threading.Condition,
        device: torch.device = HOST,
    ) -> None:
        self.num_sent = 0
        self.error = ""
        self._extents = extents
        self._num_buckets = num_buckets
        self._changed = changed
        self._buckets: queue.SimpleQueue[Sequence[Tensor] | None] = queue.SimpleQueue()
        super().__init__(address, _SENDER, deadline, device)

    def put(self, runs: Sequence[Tensor]) -> None:
        """Queues the runs of the next bucket: uint8 [nbytes] each. They must not change until they
        were sent."""
        self._buckets.put(runs)

    def close(self, reason: str = "it was closed") -> None:
        """Ends the link, even if not everything was sent. Idempotent."""
        with self._changed:
            self.error = self.error or reason
        self._is_closed.set()
        self._buckets.put(None)

    def _run(self, pair: LinkPair) -> None:
        rows = torch.tensor([(e.offset, e.nbytes) for e in self._extents], dtype=torch.int64)
        pair.send([torch.tensor([len(rows)])])
        if len(rows):
            pair.send([rows])
        for idx in range(self._num_buckets):
            runs = self._buckets.get()
            if runs is None or self.error:
                return
            pair.send(runs)
            if idx == self._num_buckets - 1:
                # A connection that is closed too early may lose what it still carries.
                pair.receive([torch.zeros(1)])
                self._is_complete = True
            with self._changed:
                self.num_sent += 1
                self._changed.notify_all()

    def _on_error(self, error: Exception) -> None:
        with self._changed:
            self.error = self.error or str(error)
            self._changed.notify_all()


class ReceivingLink(_Link):
    """A receiver's end, which fills the ring of its node with what one rank holds.

    Args:
        memories: of the ring's buckets, uint8 [bucket_nbytes] each.
        progress: of the ring.
        on_error: called in the link's thread if the link fails.
    """

    def __init__(
        self,
        address: LinkAddress,
        rank: int,
        grid: BucketGrid,
        memories: Sequence[Tensor],
        progress: SyncProgress,
        deadline: float,
        on_error: Callable[[int, Exception], None],
        device: torch.device = HOST,
    ) -> None:
        self._rank = rank
        self._grid = grid
        self._memories = memories
        self._progress = progress
        self._fail = on_error
        super().__init__(address, _RECEIVER, deadline, device)

    def close(self) -> None:
        """Idempotent."""
        self._is_closed.set()

    def _run(self, pair: LinkPair) -> None:
        memories, progress = self._memories, self._progress
        for idx, pieces in enumerate(self._grid.cut(self._receive_extents(pair))):
            num_needed = idx + 1 - len(memories)  # then the memory of bucket idx is free again
            if not progress.wait_loaded(num_needed, self._deadline, self._check_open):
                return
            memory = memories[idx % len(memories)]
            pair.receive([memory[start:stop] for start, stop in find_runs(pieces)])
            if idx == self._grid.num_buckets - 1:
                self._is_complete = True  # the engine may close the link once this one is filled
            progress.set_filled(self._rank, idx + 1)
        pair.send([torch.zeros(1)])

    def _receive_extents(self, pair: LinkPair) -> list[Extent]:
        count = torch.zeros(1, dtype=torch.int64)
        pair.receive([count])
        if not 0 <= count.item() <= MAX_TENSORS:
            raise ProtocolError(f"a rank holds at most {MAX_TENSORS} tensors, got {count.item()}")
        rows = torch.zeros(int(count.item()), 2, dtype=torch.int64)
        if len(rows):
            pair.receive([rows])
        numbers: list[list[int]] = rows.numpy().tolist()
        end = 0
        for offset, nbytes in numbers:
            if offset < end or nbytes < 1 or offset + nbytes > self._grid.image_nbytes:
                raise ProtocolError(
                    f"a rank holds bytes [{offset}, {offset + nbytes}) of the image, after byte "
                    f"{end} of {self._grid.image_nbytes}"
                )
            end = offset + nbytes
        return [Extent(key, offset, nbytes) for key, (offset, nbytes) in enumerate(numbers)]

    def _on_error(self, error: Exception) -> None:
        self._fail(self._rank, error)


def find_runs(pieces: Sequence[BucketPiece]) -> list[tuple[int, int]]:
    """The first byte of each run of pieces in their bucket, and the byte behind it.

    Each run is a message. Gaps are not sent, because they may belong to another rank. Most tensors
    have a multiple of `ALIGNMENT` bytes and leave none.
    """
    runs: list[tuple[int, int]] = []
    for piece in pieces:
        start, stop = piece.bucket_start, piece.bucket_start + piece.nbytes
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, stop))
    return runs
