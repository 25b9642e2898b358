"""Collects the state of a job when somebody asks: see `umbra.runtime.reports.job_state`.

who asks ──▶ lead ──▶ supervisors of the other nodes: ranks, actors
                  ├─▶ engines of all nodes: running and waiting requests
                  └─▶ rollout manager: groups, ranks that wait
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from umbra.runtime.actor.node_actors import NodeActors
from umbra.runtime.actor.node_context import NodeContext
from umbra.runtime.actor.supervised_actor import ActorState
from umbra.runtime.errors import UmbraError
from umbra.runtime.process.descendants import process_stat
from umbra.runtime.reports.hang_bundle import JobBundles
from umbra.runtime.reports.job_state import (
    ActorStatus,
    EngineStatus,
    JobState,
    NodeStatus,
    PoolStatus,
    RankStatus,
    RolloutStatus,
    describe_phase,
)
from umbra.runtime.rpc.rpc_server import idempotent
from umbra.runtime.settings import from_wire, to_wire

if TYPE_CHECKING:
    from umbra.runtime.pools.engine_pool import EnginePool
    from umbra.runtime.pools.pool_engine import PoolEngine
    from umbra.runtime.reports.metrics_endpoint import MetricsEndpoint


_ANSWER_LIMIT_S: Final = 1.0
"""Deadline of each process. Longer delays the whole answer by one that is blocked; shorter reports
processes of a busy machine as silent."""

ReadState = Callable[[], "Awaitable[JobState]"]
"""Reads the state of the job, on rank 0's node."""


class StateCollector:
    """Owned by the supervisor. It holds nothing, and does nothing until it is asked."""

    def __init__(
        self,
        context: NodeContext,
        actors: NodeActors,
        pools: Callable[[], Sequence[EnginePool]],
    ) -> None:
        self._node_id = context.node.node_id
        self._client = context.client
        self._ranks = context.ranks
        self._links = context.links
        self._actors = actors
        self._pools = pools

    def node(self) -> NodeStatus:
        return NodeStatus(
            name="node-0",
            node_id=self._node_id,
            ranks=tuple(
                RankStatus(rank=rank.rank, pid=rank.pid, is_stopped=_is_stopped(rank.pid))
                for rank in self._ranks.all()
            ),
            actors=tuple(
                ActorStatus(**row, is_stopped=_is_stopped(row["pid"]))
                for row in self._actors.describe()
            ),
        )

    async def job(self) -> JobState:
        """All nodes; called on rank 0's."""
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(self._nodes())
            reading = tasks.create_task(self._rollouts())
            looking = [tasks.create_task(_pool_status(pool)) for pool in self._pools()]
        pools, rollouts = tuple(task.result() for task in looking), reading.result()
        waits = _waits(pools, rollouts)
        nodes = tuple(
            replace(node, ranks=tuple(_with_wait(rank, waits) for rank in node.ranks))
            for node in asking.result()
        )
        ranks = [rank.rank for node in nodes for rank in node.ranks]
        return JobState(
            job=self._links.job,
            time=time.time(),
            phase=describe_phase(ranks, pools, rollouts),
            failure=self._ranks.failure,
            nodes=nodes,
            pools=pools,
            rollouts=rollouts,
        )

    async def _nodes(self) -> list[NodeStatus]:
        answers = await self._links.ask_elsewhere("node_status", _ANSWER_LIMIT_S)
        others = [
            NodeStatus(name=name, problem=str(answer))
            if isinstance(answer, UmbraError)
            else replace(from_wire(NodeStatus, answer), name=name)
            for name, answer in answers.items()
        ]
        return [self.node(), *others]

    async def _rollouts(self) -> RolloutStatus | None:
        for actor in self._actors.own():
            if actor.spec.role == "manager":
                name = actor.spec.name
                if actor.ref is None or actor.state != ActorState.RUNNING:
                    return RolloutStatus(name=name, problem=f"it is {actor.state}")
                try:
                    manager = self._client.handle(actor.ref)
                    stats = await manager.call("stats", timeout_s=_ANSWER_LIMIT_S)
                except UmbraError as error:
                    return RolloutStatus(name=name, problem=str(error))
                return _rollout_status(name, stats)
        return None


def _is_stopped(pid: int) -> bool:
    stat = process_stat(pid)
    return stat is not None and stat.is_stopped


def _rollout_status(name: str, stats: Mapping[str, Any]) -> RolloutStatus:
    waiting = stats["waiting_ranks"]
    groups_scoring, scoring_s = stats["scoring"]
    return RolloutStatus(
        name=name,
        call=stats["call"] or "",
        waiting_ranks=tuple(int(rank) for rank, _ in waiting),
        waiting_ages_s=tuple(float(age_s) for _, age_s in waiting),
        turns_waiting=stats["waiting_turns"],
        groups_scoring=int(groups_scoring),
        scoring_s=float(scoring_s),
        groups_at_teacher=stats["at_teacher"],
        **stats["training"],
    )


async def _pool_status(pool: EnginePool) -> PoolStatus:
    async with asyncio.TaskGroup() as tasks:
        asking = [
            tasks.create_task(_engine_status(engine)) for engine in list(pool.engines.values())
        ]
    status = PoolStatus(
        name=pool.spec.name,
        mode=pool.spec.mode,
        version=pool.sync.version,
        engines=tuple(task.result() for task in asking),
    )
    sync = pool.sync.current
    if sync is None:
        return status
    return replace(
        status,
        sync_version=sync.version,
        sync_phase=sync.state.phase.name.lower(),
        sync_age_s=time.monotonic() - sync.begun_at,
        sync_ranks=tuple(sync.state.joined_ranks),
    )


async def _engine_status(engine: PoolEngine) -> EngineStatus:
    requests = await engine.count_requests(_ANSWER_LIMIT_S)
    return EngineStatus(
        name=engine.name,
        node_id=engine.node_id,
        pid=engine.actor.pid,
        state=str(ActorState.STARTING if engine.is_starting else engine.state),
        state_age_s=engine.state_age_s,
        incarnation=engine.incarnation,
        version=engine.version,
        num_restarts=engine.actor.num_restarts,
        gpus=tuple(engine.actor.spec.gpus or ()),
        running=None if requests is None else requests[0],
        waiting=None if requests is None else requests[1],
    )


def _waits(
    pools: Sequence[PoolStatus], rollouts: RolloutStatus | None
) -> dict[int, tuple[str, float]]:
    """The call that each rank waits for, and for how long."""
    waits: dict[int, tuple[str, float]] = {}
    if rollouts is not None:
        waiting = zip(rollouts.waiting_ranks, rollouts.waiting_ages_s, strict=True)
        what = f"{rollouts.name}: {rollouts.call or 'the ledger writes the answer'}"
        waits = {rank: (what, age_s) for rank, age_s in waiting}
    for pool in pools:
        what = f"sync of version {pool.sync_version} to {pool.name}: {pool.sync_phase}"
        waits |= {rank: (what, pool.sync_age_s) for rank in pool.sync_ranks}
    return waits


def _with_wait(rank: RankStatus, waits: Mapping[int, tuple[str, float]]) -> RankStatus:
    waits_for, waits_s = waits.get(rank.rank, ("", 0.0))
    return replace(rank, waits_for=waits_for, waits_s=waits_s)


class ReportCalls:
    """Calls of ranks, `umbra top` and other supervisors about the state of the job and its node.
    The supervisor owns it and serves its public methods."""

    def __init__(self, states: StateCollector, bundles: JobBundles, metrics: MetricsHost) -> None:
        self._states = states
        self._bundles = bundles
        self._metrics = metrics

    async def bundle_late(self, why: str) -> str:
        """Called by the supervisor of another node; see `JobBundles.late`."""
        return await self._bundles.late(why)

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
        found: dict[str, Any] = to_wire(await self._states.job())
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
            await asyncio.to_thread(
                importlib.import_module, "umbra.runtime.reports.metrics_endpoint"
            )
            from umbra.runtime.reports.metrics_endpoint import MetricsEndpoint

            endpoint = MetricsEndpoint(address, self._run_dir, self._read_state)
            await endpoint.open()
            await self.close()
            self._endpoint = endpoint
        return self._endpoint.url

    async def close(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.close()
