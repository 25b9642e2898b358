"""Between nodes, a rank's part: sends its shards to the receivers of other nodes.

`LinkSender` sends bucket by bucket, and fills the image of its own node. `LinkListener` accepts the
connections of receivers.

A bucket's shards are read once, for all nodes, into memory on the GPU if they are there. A node
whose link is broken or that the supervisor reports as gone is skipped from then on; its receiver
fails by itself or has been killed. Nodes whose images hold the shards that the rank sent last get a
bucket's changes, compared once for all of them.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Final

import torch
from torch import Tensor

from umbra.runtime.errors import DeadlineExceeded
from umbra.runtime.weights.image.gpu_copies import common_device
from umbra.runtime.weights.image.image_sender import ImageFiller
from umbra.runtime.weights.image.mapped_image import KeptImage
from umbra.runtime.weights.links.bucket_deltas import SentShards
from umbra.runtime.weights.links.weight_links import LinkConnection, SendingLink, byte_runs
from umbra.runtime.weights.manifest import BucketGrid, BucketPiece
from umbra.runtime.weights.shards import RankShards, SenderParts, ShardBuckets, ShardReader
from umbra.runtime.weights.sync_messages import (
    LinkState,
    Region,
    SyncGrant,
    SyncProgressed,
    SyncSession,
    remaining_s,
)

_NUM_SLOTS: Final = 2
# A bucket is sent while the next one is read.
_REPORT_INTERVAL_S: Final = 0.25
_REPORT_SHARE: Final = 0.05
# Time between two reports, and its largest share of the time for the sync. A longer one notices
# later that the sync was aborted; a shorter one costs the supervisor calls.

_BACKLOG: Final = 512
# Connections that wait until `serve` is called: one for each other node.
_MAX_UNNAMED: Final = 512
# Connections that have not named their link. More: strangers hold descriptors that the process
# needs. Fewer: many strangers at once displace a link that comes between them.
_KEY_LIMIT_S: Final = 10.0
# Time for a connection to name its link, which it does at once. Longer: strangers hold descriptors.
# Shorter: links fail on a busy machine.
_END_S: Final = 5.0
# Time for the listening thread to end, which only has to notice it.


class LinkSender:
    """Receivers of other nodes reach this rank at the session's `tcp_host` while a sync is open."""

    network_nbytes = 0

    def __init__(self, parts: SenderParts) -> None:
        self._shards = parts.shards
        self._buckets = ShardBuckets(parts.shards)
        self._session = parts.session
        self._listener: LinkListener | None = None
        self._image = KeptImage()
        self._sent = SentShards()

    def offer(self) -> str:
        """Lets receivers connect; returns the endpoint, "HOST:PORT", or "" for none."""
        self.leave()
        if not self._session.tcp_host:
            return ""
        self._listener = LinkListener(self._session.tcp_host)
        return self._listener.endpoint

    @torch.no_grad()
    def send(self, grant: SyncGrant, deadline: float) -> list[Region] | None:
        plan = self._buckets.cut(grant)
        sync = _Sending(
            self._shards, self._session, grant, deadline, self._listener, self._image, self._sent
        )
        try:
            return sync.send(plan)
        finally:
            sync.close()
            self.network_nbytes = sync.network_nbytes

    def close(self) -> None:
        """Stops listening, unmaps the image of the node and frees kept shards."""
        self.leave()
        self._image.close()
        self._sent.clear()

    def leave(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class _Sending:
    """One sync. Owns the links and this rank's end of the image of its node."""

    def __init__(
        self,
        shards: RankShards,
        session: SyncSession,
        grant: SyncGrant,
        deadline: float,
        listener: LinkListener | None,
        image: KeptImage,
        sent: SentShards,
    ) -> None:
        self._sent = sent
        self._contents: str = grant.details["contents"]
        self._keeps_sent = False
        self._grid = BucketGrid(shards.manifest.nbytes, grant.bucket_nbytes)
        self._listener = listener
        self._shards = shards
        self._session = session
        self._grant = grant
        self._deadline = deadline
        self._changed = threading.Condition()
        self._num_filled = 0
        self._interval_s = min(_REPORT_INTERVAL_S, _REPORT_SHARE * remaining_s(deadline))
        self._report_at = 0.0
        self._is_aborted = False
        self._links: dict[int, SendingLink] = {}  # by node
        self._filler: ImageFiller | None = None  # while its node takes part
        self._image = image
        self._device = common_device(source.tensor for source in shards.sources)

    def send(self, plan: Sequence[Sequence[BucketPiece]]) -> list[Region] | None:
        reader, regions = ShardReader(self._shards), list[Region]()
        if not self._open():
            return None
        slots = [
            torch.empty(self._grant.bucket_nbytes, dtype=torch.uint8, device=self._device)
            for _ in range(_NUM_SLOTS)
        ]
        for idx, pieces in enumerate(plan):
            in_image = self._bucket_of_image(idx)
            if not self._wait_sent(idx + 1 - _NUM_SLOTS):
                return None
            memory = slots[idx % _NUM_SLOTS] if self._links or in_image is None else in_image
            regions += reader.read_bucket(pieces, memory, self._grant.has_checksums)
            runs = byte_runs(pieces)
            window = self._grid.window(idx)
            delta = None
            if self._keeps_sent:
                delta = self._sent.renew(idx, memory[: window.stop - window.start], runs)
            if memory.is_cuda:
                torch.cuda.current_stream(memory.device).synchronize()  # links have other streams
            self._num_filled = idx + 1
            for link in self._links.values():
                link.put([memory[start:stop] for start, stop in runs], delta)
            if self._filler is not None and in_image is not None:
                if memory is not in_image:
                    for start, stop in runs:
                        in_image[start:stop] = memory[start:stop]
                self._filler.set_filled(idx + 1)
        if self._keeps_sent:
            self._sent.finish(self._contents)
        is_sent = self._wait_sent(len(plan))
        return regions if is_sent and self._report() else None

    @property
    def network_nbytes(self) -> int:
        return sum(link.sent_nbytes for link in self._links.values())

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._leave_image()

    def _open(self) -> bool:
        """Opens links to all nodes that are not lost, and the own image; False if aborted."""
        answer, details = self._exchange(), self._grant.details
        key, own, bases = details["key"], details["own_node"], details["bases"]
        nodes = {*range(details["num_nodes"])}.difference(answer.gone)
        self._keeps_sent = bool(self._contents and nodes.difference([own]))
        if self._keeps_sent:
            self._sent.begin(self._grant.bucket_nbytes)
        else:
            self._sent.clear()
        for node in sorted(nodes):
            if node == own:
                self._filler = ImageFiller.open(
                    self._shards.rank,
                    details["image"],
                    self._grant,
                    self._shards.manifest.nbytes,
                    self._image,
                    self._deadline,
                )
                continue
            self._links[node] = SendingLink(
                self._shards.extents,
                self._grant.num_buckets,
                self._changed,
                base=bases[node] if self._sent.is_base(bases[node]) else "",
            )
        if self._links:
            assert self._listener is not None, "ranks with an address alone have other nodes"
            links = {f"{key}/{node}": link for node, link in self._links.items()}
            self._listener.serve(links, self._deadline)
        return not answer.is_aborted

    def _bucket_of_image(self, idx: int) -> Tensor | None:
        """A bucket's memory in the image of this node; None if the node no longer takes part."""
        if self._filler is None:
            return None
        memory = self._filler.bucket(idx)
        if memory is None:
            self._leave_image()
            self._report()  # the node is gone, or the sync was aborted
        return memory

    def _leave_image(self) -> None:
        if self._filler is not None:
            self._filler.close()
            self._filler = None

    def _wait_sent(self, num_buckets: int) -> bool:
        """Waits until every working link has sent this many buckets; False if aborted."""
        while True:
            self._report_in_time()
            if self._is_aborted:
                return False
            with self._changed:
                if self._is_sent(num_buckets):
                    return True
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    sent = [link.num_sent for link in self._links.values()]
                    raise DeadlineExceeded(
                        f"{sent} of at least {num_buckets} buckets are sent to nodes and the time "
                        "is used up"
                    )
                timeout_s = min(left_s, self._interval_s)
                self._changed.wait_for(lambda: self._is_sent(num_buckets), timeout_s)

    def _is_sent(self, num_buckets: int) -> bool:
        return all(link.error or link.num_sent >= num_buckets for link in self._links.values())

    def _report_in_time(self) -> None:
        if time.monotonic() >= self._report_at:
            self._report()

    def _report(self) -> bool:
        """Reports the progress, and skips nodes that are gone; False if aborted."""
        answer = self._exchange()
        for node in self._links.keys() & set(answer.gone):
            self._links[node].close("the supervisor reports that the node is gone")
        self._is_aborted = answer.is_aborted
        return not self._is_aborted

    def _exchange(self) -> LinkState:
        self._session.raise_if_lost()
        self._report_at = time.monotonic() + self._interval_s
        return self._session.sync(
            SyncProgressed(
                sync_id=self._grant.sync_id,
                rank=self._shards.rank,
                num_filled=self._num_filled,
                deadline=self._deadline,
            )
        )


class LinkListener:
    """Listens for receivers of other nodes while a sync is open. Owns the listening socket, its
    thread, and one thread for each link whose other end has come.

    A connection begins with the key of its link, which only the ends of the link get, over umbra's
    calls. Any other key closes it. Connections without a key hold no thread, and the oldest makes
    room where there are too many.
    """

    def __init__(self, host: str) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.endpoint = f"{host}:{self._socket.getsockname()[1]}"
        self._links: dict[bytes, SendingLink] = {}
        self._unnamed: dict[socket.socket, _Unnamed] = {}  # the oldest first
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def serve(self, links: Mapping[str, SendingLink], deadline: float) -> None:
        """Runs each link, by key, once its other end has come."""
        self._links = {key.encode(): link for key, link in links.items()}
        self._socket.setblocking(False)
        self._thread = threading.Thread(
            target=self._listen, args=(deadline,), name="links", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Leaves connections of links alone. Idempotent."""
        self._is_closed = True
        with suppress(OSError):  # it was closed before
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which `close` does not
        if self._thread is None:
            self._socket.close()
        else:
            self._thread.join(_END_S)

    def _listen(self, deadline: float) -> None:
        with self._socket, selectors.DefaultSelector() as selector, ExitStack() as stack:
            stack.callback(self._close_unnamed)
            selector.register(self._socket, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select(self._wait_s())]
                for stream in [stream for stream in self._unnamed if stream in ready]:
                    self._hear(stream, selector, deadline)
                now = time.monotonic()
                for stream, unnamed in list(self._unnamed.items()):
                    if unnamed.until <= now:
                        self._drop(stream, selector)
                if self._socket in ready and not self._accept(selector, deadline):
                    return

    def _accept(self, selector: selectors.BaseSelector, deadline: float) -> bool:
        try:
            stream, _ = self._socket.accept()
        except BlockingIOError:  # the other end was gone before
            return True
        except OSError as error:
            if self._unnamed and not self._is_closed:  # too many open files, perhaps
                self._drop(next(iter(self._unnamed)), selector)
                return True
            for link in list(self._links.values()):  # after `close`, all links are closed, too
                link.close(f"no connection could be accepted: {error}")
            return False
        if len(self._unnamed) >= _MAX_UNNAMED:
            self._drop(next(iter(self._unnamed)), selector)
        stream.setblocking(False)
        self._unnamed[stream] = _Unnamed(min(deadline, time.monotonic() + _KEY_LIMIT_S))
        selector.register(stream, selectors.EVENT_READ)
        return True

    def _hear(
        self, stream: socket.socket, selector: selectors.BaseSelector, deadline: float
    ) -> None:
        try:
            key = self._unnamed[stream].read(stream)
            if key is None:
                return
            link = self._links.pop(key)  # good for one connection
        except (OSError, KeyError):
            self._drop(stream, selector)
            return
        selector.unregister(stream)
        del self._unnamed[stream]
        connection = LinkConnection(stream, deadline)
        thread = threading.Thread(
            target=link.run, args=(connection,), name="weight-link", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the process has too many
            connection.close()
            link.close(f"no thread could be started for it: {error}")

    def _drop(self, stream: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(stream)
        del self._unnamed[stream]
        stream.close()

    def _close_unnamed(self) -> None:
        for stream in self._unnamed:
            stream.close()

    def _wait_s(self) -> float | None:
        if not self._unnamed:
            return None
        return max(0.0, min(each.until for each in self._unnamed.values()) - time.monotonic())


class _Unnamed:
    """A connection that has not sent its whole key; closed at `until`."""

    def __init__(self, until: float) -> None:
        self.until = until
        self._frame = bytearray()  # as of `LinkConnection.receive_frame`

    def read(self, stream: socket.socket) -> bytes | None:
        """The key, and nothing behind it; None while it is not complete. Raises OSError."""
        while True:
            missing = 1 + (self._frame[0] if self._frame else 0) - len(self._frame)
            if self._frame and not missing:
                return bytes(self._frame[1:])
            try:
                data = stream.recv(missing)
            except BlockingIOError:
                return None
            if not data:
                raise ConnectionResetError("the other end closed the connection")
            self._frame += data
