"""`umbra bench rpc`: an echo of 100 bytes between two processes, umbra beside its peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from umbra.runtime.bench.program import ALL_SYSTEMS
from umbra.runtime.bench.rounds import compare

_DURATION_S: Final = 0.6
"""Of each measurement in a round. Shorter, a 99th percentile of Ray rests on a handful of calls;
longer, five rounds of five systems take minutes."""


def run(rounds: int, peer_python: str, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Medians over `rounds`.

    Per system: `p50_us` and `p99_us` of sequential calls; `calls_per_s` with many in flight, in the
    way named by `idiom`, the fastest of several tried; `ready_s`, from the start of its services to
    their being ready; `first_call_s`, from there to the first answered call; `resident_mb` of its
    processes beside the two that talk. The callee is a plain method for umbra and bare_zmq and an
    asyncio actor for the others; `async_*` is umbra's `async def`, `sync_actor_*` Ray's plain
    actor, `session_p50_us` umbra's synchronous face with its thread hop, `batch_calls_per_s`
    Xoscar's batches, which have one outcome for all their calls.
    """
    return compare(
        "rpc",
        ALL_SYSTEMS,
        rounds=rounds,
        peer_python=peer_python,
        duration_s=_DURATION_S,
        on_progress=on_progress,
    )
