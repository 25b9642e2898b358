"""Processes that end as soon as their links have sent everything: python ending_links.py

Prints their exit statuses as JSON. Each has both ends of six links.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import torch

from umbra.runtime.weights.transports.nccl.weight_links import (
    LinkAddress,
    ReceivingLink,
    SendingLink,
    open_store,
)
from umbra.runtime.weights.transports.shared_memory.bucket_grid import BucketGrid, Extent
from umbra.runtime.weights.transports.shared_memory.sync_progress import SyncProgress

_NUM_PROCESSES = 8
_NBYTES = 4096


def exchange() -> None:
    grid = BucketGrid(2 * _NBYTES, _NBYTES)
    fd, progress = SyncProgress.create("links", 6, 1)
    os.close(fd)
    memories = [torch.empty(_NBYTES, dtype=torch.uint8) for _ in range(grid.num_buckets)]
    store, address = open_store("127.0.0.1")
    deadline = time.monotonic() + 60.0
    changed = threading.Condition()
    addresses = [LinkAddress(address, f"link-{idx}") for idx in range(6)]
    receivers = [
        ReceivingLink(link, idx, grid, memories, progress, deadline, _report)
        for idx, link in enumerate(addresses)
    ]
    extents = [Extent(0, 0, grid.image_nbytes)]
    senders = [
        SendingLink(link, extents, grid.num_buckets, deadline, changed) for link in addresses
    ]
    for sender in senders:
        for memory in memories:
            sender.put([memory])
    with changed:
        assert changed.wait_for(lambda: all(s.num_sent == grid.num_buckets for s in senders), 60.0)
    for link in (*senders, *receivers):
        link.wait_ended()
    del store


def _report(rank: int, error: Exception) -> None:
    print(f"link {rank}: {error}", file=sys.stderr)


def main() -> None:
    statuses: list[int] = []
    for _ in range(_NUM_PROCESSES):
        pid = os.fork()
        if pid == 0:
            exchange()
            sys.exit()
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
