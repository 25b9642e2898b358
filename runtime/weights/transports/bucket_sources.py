"""Opens the buckets of a sync in an engine. Torch-free, unless the engine receives for its node."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from umbra.runtime.weights.transports.base import BucketSource
from umbra.runtime.weights.transports.shared_memory.memfd import BucketMappings
from umbra.runtime.weights.transports.shared_memory.ring_source import RingSource
from umbra.runtime.weights.transports.shared_memory.sync_progress import EngineEnd

if TYPE_CHECKING:
    from torch import Tensor


def open_source(
    mappings: BucketMappings,
    image_nbytes: int,
    buckets: Mapping[str, Any],
    timeout_s: float,
    parameters: Collection[Tensor] = (),
) -> BucketSource:
    """
    Args:
        mappings: of the engine, kept between syncs.
        image_nbytes: of the manifest.
        buckets: the arguments of begin_update.
        timeout_s: limit for the supervisor to pass the buckets.
        parameters: of the engine. If all are on one GPU, that GPU can receive for its node.

    Raises:
        ConnectionLost, DeadlineExceeded, WeightSyncError: the supervisor does not pass them.
    """
    fd_socket, names = buckets["fd_socket"], buckets["names"]
    mapped = mappings.open(fd_socket, names, buckets["bucket_nbytes"], timeout_s)
    ring = RingSource(mapped, EngineEnd(buckets, timeout_s))
    if "receives" not in buckets:
        return ring
    # It imports torch, which some engines otherwise do without.
    from umbra.runtime.weights.transports.nccl.node_receiver import NodeReceiver

    try:
        return NodeReceiver(ring, mapped, image_nbytes, buckets, timeout_s, parameters)
    except BaseException:
        ring.close()
        raise
