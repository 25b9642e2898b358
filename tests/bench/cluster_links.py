"""Both ends of many links for weights, in one process: python cluster_links.py NUM_LINKS

Prints the costs of one end of one link as JSON: `link_cpu_s` from its start until a few bytes have
arrived, `link_threads` and `link_fds` while it is open. All links are of one rank.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import torch

from umbra.runtime.weights.transports.nccl.link_listener import LinkListener
from umbra.runtime.weights.transports.nccl.weight_links import ReceivingLink, SendingLink
from umbra.runtime.weights.transports.shared_memory.bucket_grid import BucketGrid, Extent
from umbra.runtime.weights.transports.shared_memory.mapped_image import MappedImage
from umbra.runtime.weights.transports.shared_memory.memfd import create_memory
from umbra.runtime.weights.transports.shared_memory.sync_progress import SyncProgress

_NBYTES = 4096
_LIMIT_S = 120.0


def measure(num_links: int) -> dict[str, float]:
    torch.set_num_threads(1)
    listener = LinkListener("127.0.0.1")
    grid = BucketGrid(2 * _NBYTES, _NBYTES)
    fd, progress = SyncProgress.create("links", num_links, 1)
    os.close(fd)
    image = MappedImage(create_memory("image", grid.image_nbytes), grid.image_nbytes)
    deadline = time.monotonic() + _LIMIT_S
    changed = threading.Condition()
    before = _count("task"), _count("fd")
    cpu_s = time.process_time()
    extents = [Extent(0, 0, 2 * _NBYTES)]
    senders = {
        f"link-{idx}": SendingLink(extents, grid.num_buckets, changed) for idx in range(num_links)
    }
    endpoint, receivers = listener.endpoint, list[ReceivingLink]()
    for idx, key in enumerate(senders):
        link = ReceivingLink(endpoint, key, idx, grid, image, progress, deadline, _ignore)
        receivers.append(link)
    listener.serve(senders, deadline)
    chunk = torch.zeros(_NBYTES, dtype=torch.uint8)
    for sender in senders.values():
        sender.put([chunk])
    assert progress.wait_filled(1, deadline)
    cpu_s = time.process_time() - cpu_s
    after = _count("task"), _count("fd")
    num_ends = 2 * num_links
    facts = {
        "link_cpu_s": cpu_s / num_ends,
        "link_threads": (after[0] - before[0]) / num_ends,
        "link_fds": (after[1] - before[1]) / num_ends,
    }
    for link in (*senders.values(), *receivers):
        link.close()
    for thread in threading.enumerate():
        if thread.name == "weight-link":
            thread.join(_LIMIT_S)
    progress.close()
    image.close()
    listener.close()
    return facts


def _ignore(rank: int, error: Exception) -> None:
    """Links are closed before everything has arrived."""


def _count(kind: str) -> int:
    return len(os.listdir(f"/proc/self/{kind}"))


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
