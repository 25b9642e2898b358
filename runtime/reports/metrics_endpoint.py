"""Serves the state of a job over HTTP for Prometheus, read again for each request.

aiohttp takes long to import, so the supervisor imports this module when it is asked to serve.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from aiohttp import web

from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.errors import ConfigError
from umbra.runtime.http_listening import listen, url_of
from umbra.runtime.reports.job_state import JobState, RolloutStatus
from umbra.runtime.reports.run_metrics import Row, last_steps
from umbra.runtime.settings import split_address

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_NO_NAME: Final = re.compile(r"[^a-zA-Z0-9_]")
_GROUPS: Final = ("open", "scoring", "ready", "leased")
_OUTCOMES: Final = ("admitted", "trained", "dropped")


class MetricsEndpoint:
    """Owns the listening socket, from `open` to `close`; port 0 takes a free one."""

    def __init__(
        self, address: str, run_dir: Path, read_state: Callable[[], Awaitable[JobState]]
    ) -> None:
        self.address = address
        self.url = ""
        self._run_dir = run_dir
        self._read_state = read_state
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        """Raises ConfigError if it cannot listen there."""
        app = web.Application()
        app.add_routes([web.get("/metrics", self._metrics)])
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        remedy = (
            "set run.metrics_address to another address of rank 0's host, or to port 0, which "
            "takes a free one"
        )
        try:
            bound = await listen(self._runner, *split_address(self.address), remedy)
        except ConfigError:
            await self.close()
            raise
        self.url = f"{url_of(*bound)}/metrics"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        steps = await asyncio.to_thread(last_steps, self._run_dir)
        text = exposition(await self._read_state(), steps[-1] if steps else None)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


@dataclass(frozen=True, slots=True)
class _Family:
    """A metric: its samples are pairs of labels and value."""

    name: str
    help: str
    kind: Literal["gauge", "counter"] = "gauge"
    samples: list[tuple[Mapping[str, str], float]] = field(
        default_factory=list[tuple[Mapping[str, str], float]]
    )

    def add(self, value: float | None, **labels: str) -> None:
        """An unknown value is left out."""
        if value is not None:
            self.samples.append((labels, value))

    def lines(self) -> list[str]:
        return [
            f"# HELP {self.name} {self.help}",
            f"# TYPE {self.name} {self.kind}",
            *(f"{self.name}{_labels(labels)} {_number(value)}" for labels, value in self.samples),
        ]


def exposition(state: JobState, last_step: Row | None) -> str:
    """All metrics of the job and of its last complete step.

    docs/watch.md has the names.
    """
    families = [*_job(state), *_pools(state), *_rollouts(state.rollouts), *_step(last_step)]
    lines = [line for family in families if family.samples for line in family.lines()]
    return "\n".join(lines) + "\n"


def _job(state: JobState) -> Iterable[_Family]:
    failed = _Family("umbra_job_failed", "1 if the job is lost.")
    failed.add(bool(state.failure))
    waits = _Family("umbra_rank_wait_seconds", "Age of the call that a rank waits in, or 0.")
    for rank in state.ranks:
        waits.add(rank.waits_s, rank=str(rank.rank))
    restarts = _Family("umbra_restarts_total", "Restarts of a process.", "counter")
    for node in state.nodes:
        for actor in node.actors:
            restarts.add(actor.num_restarts, actor=actor.name, role=actor.role, node=node.node_id)
    return failed, waits, restarts


def _pools(state: JobState) -> Iterable[_Family]:
    version = _Family("umbra_pool_version", "Version of the weights that a pool got last.")
    syncing = _Family("umbra_pool_syncing", "1 while a weight sync is in progress.")
    engines = _Family("umbra_engines", "Engines of a pool by their state.")
    own = _Family("umbra_engine_version", "Version of the weights that an engine holds.")
    running = _Family("umbra_engine_running", "Requests that an engine generates for.")
    waiting = _Family("umbra_engine_waiting", "Requests that an engine has queued.")
    for pool in state.pools:
        version.add(pool.version, pool=pool.name)
        syncing.add(pool.sync_version is not None, pool=pool.name)
        for each in EngineState:
            count = sum(engine.state == each for engine in pool.engines)
            engines.add(count, pool=pool.name, state=each.lower())
        for engine in pool.engines:
            labels = {"pool": pool.name, "engine": engine.name}
            own.add(engine.version, **labels)
            running.add(engine.running, **labels)
            waiting.add(engine.waiting, **labels)
    return version, syncing, engines, own, running, waiting


def _rollouts(rollouts: RolloutStatus | None) -> Iterable[_Family]:
    if rollouts is None or rollouts.problem:
        return ()
    held = _Family("umbra_groups", "Groups that are held, by state; all but leased are open.")
    for name in _GROUPS:
        held.add(getattr(rollouts, f"groups_{name}"), state=name)
    done = _Family("umbra_groups_total", "Groups since the run began, by outcome.", "counter")
    for name in _OUTCOMES:
        done.add(getattr(rollouts, f"groups_{name}"), outcome=name)
    trajectories = _Family("umbra_trajectories_open", "Trajectories that are not finished.")
    trajectories.add(rollouts.trajectories_open)
    turns = _Family("umbra_turns_waiting", "Requests that wait for an engine.")
    turns.add(rollouts.turns_waiting)
    tokens = _Family("umbra_open_tokens", "Tokens generated so far for open groups.")
    tokens.add(rollouts.tokens)
    return held, done, trajectories, turns, tokens


def _step(row: Row | None) -> Iterable[_Family]:
    if row is None:
        return ()
    named = {"umbra_step": row["step"], "umbra_step_timestamp_seconds": row["time"]}
    named |= {
        f"umbra_step_{_NO_NAME.sub('_', name)}": value
        for name, value in row.items()
        if name not in ("step", "time")
    }
    families: list[_Family] = []
    for name, value in named.items():
        family = _Family(name, "Of the last step that is done; see docs/metrics.md.")
        family.add(value)
        families.append(family)
    return families


def _labels(labels: Mapping[str, str]) -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value) if isinstance(value, bool) else value)
