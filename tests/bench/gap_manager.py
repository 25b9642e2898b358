"""A manager that keeps engines busy and records when their tokens arrive."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from pathlib import Path
from typing import Any, Self

import numpy as np

from umbra.runtime.actor.actor_spec import ActorSpec, actor_context
from umbra.runtime.engine_api.token_deltas import DeltaBatch
from umbra.runtime.errors import UmbraError
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher
from umbra.runtime.rollout.dispatch.engine_fleet import Fleet
from umbra.runtime.rollout.dispatch.router import EngineId, Router
from umbra.runtime.rollout.dispatch.trajectory import Trajectory, Turn
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.rollout.rollout_config import (
    DispatchConfig,
    RolloutConfig,
    RolloutSettings,
    SamplingOptions,
)
from umbra.runtime.settings import from_wire


def gap_manager_spec(pool: str, prompt_len: int, completion_len: int) -> ActorSpec:
    """The actor "rollouts" that gives engines of `pool` completions of up to `completion_len`."""
    config = RolloutConfig(
        settings=RolloutSettings(max_new_tokens=completion_len),
        dispatch=DispatchConfig(pool=pool, max_context_len=prompt_len + completion_len),
        prompts_path="none",
        world_size=1,
        worker_names=("none",),
    )
    return ActorSpec(
        name="rollouts",
        target="gap_manager:GapManager",
        sys_path=(str(Path(__file__).parent),),
        kwargs={"config": config, "prompt_len": prompt_len},
    )


class GapManager:
    """An actor: the parts of a rollout manager between the engines and the trajectories.

    Args:
        config: `RolloutConfig` as plain values.
    """

    def __init__(self, config: dict[str, Any], prompt_len: int) -> None:
        self._config = from_wire(RolloutConfig, config)
        self._prompt = Prompt("p", "prompt", np.arange(1, prompt_len + 1, dtype=np.int32), {})
        router = Router(self._config.dispatch.max_inflight_per_engine)
        self._dispatcher = _NotingDispatcher(router, _fail, Recorder(None, _fail))
        self._fleet = Fleet(
            self._config.dispatch, actor_context(), self._dispatcher, lambda text: None
        )
        self._num_begun = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    async def run(self) -> None:
        await self._fleet.run(lambda: None)

    def keep_in_flight(self, count: int) -> None:
        """Gives the pool `count` trajectories for ever."""
        for _ in range(count):
            self._submit()

    async def first_tokens(self, version: int, num_engines: int) -> list[float]:
        """Monotonic time at which each engine's first token of `version` was applied."""
        while len(self._dispatcher.came_at.get(version, ())) < num_engines:
            self._dispatcher.changed.clear()
            await self._dispatcher.changed.wait()
        return list(self._dispatcher.came_at[version].values())

    def token_gaps(self, since: float, until: float) -> dict[str, float]:
        """The `longest` and the `median` time between two arrivals of tokens of one request, some
        of it in that span; a request that was cut off and submitted again counts as another one."""
        gaps = [
            b - a
            for times in self._dispatcher.arrived_at.values()
            for a, b in itertools.pairwise(times)
            if b > since and a < until
        ]
        return {"longest": max(gaps), "median": statistics.median(gaps)}

    def _submit(self) -> None:
        self._num_begun += 1
        sample = Trajectory(
            f"s{self._num_begun}",
            self._prompt,
            self._num_begun,
            # of every length, so that they do not end together
            budget=1 + self._num_begun * 37 % self._config.settings.max_new_tokens,
            max_context_len=self._config.dispatch.max_context_len,
        )
        self._dispatcher.submit(
            Turn(
                trajectory=sample,
                group=None,
                start=0,
                limit=sample.budget,
                sampling=SamplingOptions(temperature=1.0, stop_token_ids=[]),
                on_end=lambda _turn, _reason: self._submit(),
            )
        )


class _NotingDispatcher(Dispatcher):
    def __init__(self, router: Router, on_failure: Any, recorder: Recorder) -> None:
        super().__init__(router, on_failure, recorder)
        self.came_at: dict[int, dict[EngineId, float]] = {}
        self.arrived_at: dict[tuple[EngineId, int], list[float]] = {}  # by request
        self.changed = asyncio.Event()

    def on_batch(self, engine: EngineId, batch: DeltaBatch) -> None:
        super().on_batch(engine, batch)
        now = time.monotonic()
        for request in np.unique(batch.ids).tolist():
            self.arrived_at.setdefault((engine, request), []).append(now)
        for version in np.unique(batch.versions).tolist():
            self.came_at.setdefault(version, {}).setdefault(engine, now)
        self.changed.set()


def _fail(error: UmbraError) -> None:
    raise error
