"""NCCL, a rank's part: sends its shards to every engine, bucket by bucket.

A bucket's shards are read once, for all engines. An engine whose link is broken or that the
supervisor has dismissed is skipped from then on; it fails by itself or has been killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from umbra.runtime.errors import DeadlineExceeded
from umbra.runtime.weights.sync_calls import (
    Region,
    SyncGrant,
    SyncProgressed,
    SyncSupervisor,
    remaining_s,
)
from umbra.runtime.weights.transports.nccl.weight_links import (
    LinkAddress,
    SendingLink,
    open_store,
    pack,
)
from umbra.runtime.weights.transports.shard_reader import RankShards, ShardBuckets
from umbra.runtime.weights.transports.shared_memory.bucket_grid import BucketPiece

_NUM_SLOTS: Final = 2
# A bucket is sent while the next one is read.
_REPORT_INTERVAL_S: Final = 0.25
_REPORT_SHARE: Final = 0.05
# Time between two reports, and its largest share of the time for the sync. A longer one notices
# later that the sync was aborted; a shorter one costs the supervisor calls.


class LinkSender:
    """Args:
    supervisor: gets reports of the progress.
    store_host: address at which rank 0 offers a store while a sync is open; "" for no store.
    """

    is_read_by_engines = False

    def __init__(self, shards: RankShards, supervisor: SyncSupervisor, store_host: str) -> None:
        self._shards = shards
        self._buckets = ShardBuckets(shards)
        self._supervisor = supervisor
        self._store_host = store_host
        self._store: Any = None

    def offer_store(self) -> str:
        """On rank 0 opens a store for the next sync; returns its address, or "" for none."""
        self.close()
        if self._shards.rank != 0 or not self._store_host:
            return ""
        self._store, address = open_store(self._store_host)
        return address

    @torch.no_grad()
    def send(self, grant: SyncGrant, deadline: float) -> list[Region] | None:
        """See `Sender.send`."""
        plan = self._buckets.cut(grant)
        sync = _Sending(self._shards, self._supervisor, grant, deadline)
        try:
            return sync.send(plan)
        finally:
            sync.close()

    def close(self) -> None:
        """Closes the store. Idempotent."""
        self._store = None


class _Sending:
    """One sync. Owns the links."""

    def __init__(
        self, shards: RankShards, supervisor: SyncSupervisor, grant: SyncGrant, deadline: float
    ) -> None:
        self._shards = shards
        self._supervisor = supervisor
        self._grant = grant
        self._deadline = deadline
        self._changed = threading.Condition()
        self._num_filled = 0
        self._interval_s = min(_REPORT_INTERVAL_S, _REPORT_SHARE * remaining_s(deadline))
        self._report_at = 0.0
        self._num_engines: int = grant.details["progress"]["num_engines"]
        self._links: dict[int, SendingLink] = {}  # by engine

    def send(self, plan: Sequence[Sequence[BucketPiece]]) -> list[Region] | None:
        reader, regions = self._shards.reader(), list[Region]()
        if not self._open_links():
            return None
        slots = [
            torch.empty(self._grant.bucket_nbytes, dtype=torch.uint8) for _ in range(_NUM_SLOTS)
        ]
        for idx, pieces in enumerate(plan):
            if not self._wait_sent(idx + 1 - _NUM_SLOTS):
                return None
            placed, nbytes = pack(pieces)
            chunk = slots[idx % _NUM_SLOTS][:nbytes]
            for start, piece in placed:
                target = chunk[start : start + piece.nbytes]
                checksum = reader.read_into(piece, target, self._grant.has_checksums)
                offset = self._shards.extents[piece.key].offset + piece.start
                regions.append((offset, piece.nbytes, checksum))
            self._put(chunk)
            self._num_filled = idx + 1
        is_sent = self._wait_sent(len(plan))
        return regions if is_sent and self._report() else None

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _open_links(self) -> bool:
        """To all engines but those that were lost while they got ready; False if the sync is
        aborted."""
        answer = self._exchange()
        store, key = self._grant.details["store"], self._grant.details["key"]
        for engine in sorted({*range(self._num_engines)}.difference(answer["dismissed"])):
            self._links[engine] = SendingLink(
                LinkAddress(store, f"{key}/{engine}/{self._shards.rank}"),
                self._shards.extents,
                self._grant.num_buckets,
                self._deadline,
                self._changed,
            )
        return not answer["is_aborted"]

    def _put(self, chunk: Tensor) -> None:
        for link in self._links.values():
            link.put(chunk)

    def _wait_sent(self, num_buckets: int) -> bool:
        """Waits until this many buckets have been sent to every engine whose link works; returns
        False if the sync is aborted.

        Raises:
            DeadlineExceeded: the time of the sync is used up.
        """
        while True:
            if time.monotonic() >= self._report_at and not self._report():
                return False
            with self._changed:
                if self._is_sent(num_buckets):
                    return True
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    sent = [link.num_sent for link in self._links.values()]
                    raise DeadlineExceeded(
                        f"{sent} of at least {num_buckets} buckets are sent to engines and the "
                        "time is used up"
                    )
                timeout_s = min(left_s, self._interval_s)
                self._changed.wait_for(lambda: self._is_sent(num_buckets), timeout_s)

    def _is_sent(self, num_buckets: int) -> bool:
        return all(link.error or link.num_sent >= num_buckets for link in self._links.values())

    def _report(self) -> bool:
        """Reports the progress, and skips engines that are lost; returns False if the sync is
        aborted."""
        answer = self._exchange()
        for engine in self._links.keys() & set(answer["dismissed"]):
            self._links[engine].close("the supervisor has dismissed the engine")
        return not answer["is_aborted"]

    def _exchange(self) -> Mapping[str, Any]:
        """Reports what was sent; returns the answer, see `ReportedProgress.observe`."""
        self._supervisor.check()
        self._report_at = time.monotonic() + self._interval_s
        with self._changed:
            links = (self._links.get(engine) for engine in range(self._num_engines))
            sent = [0 if link is None else link.num_sent for link in links]
        return self._supervisor.sync_progress(
            SyncProgressed(
                sync_id=self._grant.sync_id,
                rank=self._shards.rank,
                num_filled=self._num_filled,
                sent=sent,
                deadline=self._deadline,
            )
        )
