"""Calls of ranks, `umbra top` and other supervisors about the state of the job and its node."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umbra.runtime.cluster.attached_ranks import AttachedRanks
from umbra.runtime.cluster.gpu_shortage import RankMemory
from umbra.runtime.hang_bundle import JobBundles
from umbra.runtime.rpc.rpc_server import idempotent
from umbra.runtime.settings import to_wire
from umbra.runtime.state_collector import StateCollector

if TYPE_CHECKING:
    from umbra.runtime.job_state import JobState
    from umbra.runtime.metrics_endpoint import MetricsEndpoint

ReadState = Callable[[], "Awaitable[JobState]"]
"""Reads the state of the job, on rank 0's node."""


class ReportCalls:
    """Its public methods are calls of the supervisor, which owns it."""

    def __init__(
        self,
        ranks: AttachedRanks,
        states: StateCollector,
        bundles: JobBundles,
        metrics: MetricsHost,
        read_state: ReadState,
    ) -> None:
        self._ranks = ranks
        self._states = states
        self._bundles = bundles
        self._metrics = metrics
        self._read_state = read_state

    def note_gpu_memory(self, rank: int, allocated_nbytes: int, reserved_nbytes: int) -> None:
        """Called by a rank with the memory that torch has on its GPU; see `gpu_shortage`."""
        memory = RankMemory(allocated_nbytes=allocated_nbytes, reserved_nbytes=reserved_nbytes)
        self._ranks.note_gpu_memory(rank, memory)

    async def report_node(self) -> dict[str, str]:
        """Called by the supervisor of rank 0's node, for a bundle."""
        return dict(await self._bundles.report_node())

    def node_status(self) -> dict[str, Any]:
        """Called by the supervisor of rank 0's node: a `NodeStatus`."""
        found: dict[str, Any] = to_wire(self._states.node())
        return found

    @idempotent
    async def job_state(self) -> dict[str, Any]:
        """A `JobState`. Called on rank 0's node."""
        found: dict[str, Any] = to_wire(await self._read_state())
        return found

    async def serve_metrics(self, address: str) -> str:
        """Called by rank 0; see `MetricsHost.serve`."""
        return await self._metrics.serve(address)


class MetricsHost:
    """Serves metrics for Prometheus once rank 0 has asked for it. Owned by the supervisor."""

    def __init__(self, run_dir: Path | None, read_state: ReadState) -> None:
        self._run_dir = run_dir
        self._read_state = read_state
        self._endpoint: MetricsEndpoint | None = None

    async def serve(self, address: str) -> str:
        """Serves until the job ends, or rank 0 is on another node; returns the URL. `address` is
        HOST:PORT; port 0 takes a free one, which a later call finds again. Raises ConfigError if it
        cannot listen there."""
        assert self._run_dir is not None
        if self._endpoint is None or self._endpoint.address != address:
            await asyncio.to_thread(importlib.import_module, "umbra.runtime.metrics_endpoint")
            from umbra.runtime.metrics_endpoint import MetricsEndpoint

            endpoint = MetricsEndpoint(address, self._run_dir, self._read_state)
            await endpoint.open()
            await self.close()
            self._endpoint = endpoint
        return self._endpoint.url

    async def close(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.close()
