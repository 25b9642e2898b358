"""A manager without engines, workers and ranks: these are played, and everything is recorded.

Token i of a completion depends on (seed, i) alone, its logprob on (i, version).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from dispatch_bench import delta

from umbra.runtime.engine_api.token_deltas import DeltaBatch
from umbra.runtime.errors import LedgerError, RewardError, RolloutError, UmbraError
from umbra.runtime.rollout.agents.agent_sessions import AgentSessions
from umbra.runtime.rollout.agents.worker_pool import WorkerJob
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher
from umbra.runtime.rollout.dispatch.router import EngineId, Router
from umbra.runtime.rollout.dispatch.trajectory import Group, Trajectory
from umbra.runtime.rollout.ledger.ledger_events import Evaluated, Restored
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.manager.group_recovery import recover_groups
from umbra.runtime.rollout.manager.group_runner import GroupRunner
from umbra.runtime.rollout.manager.training_flow import TrainingFlow
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.rollout.rollout_config import RolloutConfig

STOP = 0
GIVEN_FROM = 1000  # tokens of tools; engines make smaller ones


def token_at(seed: int, position: int) -> int:
    mixed = (seed * 1_000_003 + position * 7_919 + 17) * 0x9E3779B97F4A7C15
    return (mixed >> 32) % 12


def logprob_at(position: int, version: int) -> float:
    return -0.5 * position - 64.0 * version  # exact in float32


class Taken(NamedTuple):
    """A sample as the ranks got it."""

    tokens: list[int]
    versions: list[int]
    reward: float | None
    parts: str  # of the reward; NaN differs from itself


class Engine:
    """Generates for requests; its deltas arrive in order, when the test delivers them."""

    def __init__(self, engine_id: EngineId, version: int) -> None:
        self.engine_id = engine_id
        self.version = version
        self.requests: dict[int, dict[str, Any]] = {}
        self.outbox: deque[DeltaBatch] = deque()
        self.has_lost = False

    def send(self, request: dict[str, Any]) -> None:
        self.requests[request["id"]] = dict(request)

    def withdraw(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def tick(self, chance: random.Random) -> None:
        """Some tokens of each request; now and then a run is lost, or sent twice."""
        runs: list[tuple[int, int, list[int], int]] = []
        finishes: list[tuple[int, str]] = []
        for request in list(self.requests.values()):
            at, count = request["position"], min(chance.randrange(5), request["max_new_tokens"])
            run: list[int] = []
            while len(run) < count and STOP not in run:
                run.append(token_at(request["seed"], at + len(run)))
            request["position"] += len(run)
            request["max_new_tokens"] -= len(run)
            reason = "stop" if STOP in run else "" if request["max_new_tokens"] else "length"
            if reason:
                finishes.append((request["id"], reason))
                del self.requests[request["id"]]
            if not run:
                continue
            self.has_lost = not self.has_lost and not reason and chance.random() < 0.03
            copies = 0 if self.has_lost else 2 if chance.random() < 0.05 else 1
            runs += [(request["id"], at, run, self.version)] * copies
        self._post(runs, finishes)

    def abort(self, request_ids: list[int]) -> None:
        self.withdraw(request_ids)
        self._post([], [(request_id, "abort") for request_id in request_ids])

    def _post(self, runs: list[Any], finishes: list[tuple[int, str]]) -> None:
        batch = delta(runs, finishes)
        for idx, version in enumerate(batch.versions):
            begin, end = batch.bounds[idx], batch.bounds[idx + 1]
            first = batch.positions[idx]
            for at in range(begin, end):
                batch.logprobs[at] = logprob_at(first + at - begin, version)
        if runs or finishes:
            self.outbox.append(batch)


class Workers:
    """Stands where the worker pool would; its outcomes are the test's."""

    def __init__(self) -> None:
        self.queue: list[WorkerJob] = []
        self.scoring: list[tuple[WorkerJob, int]] = []

    def put(self, job: WorkerJob) -> None:
        self.queue.append(job)

    def fail(self, job: WorkerJob) -> None:
        """Does the same as WorkerPool."""
        if not job.is_active():
            return
        if job.retries > 0:
            job.retries -= 1
            self.put(job)
        elif job.method == "score":
            job.on_failure(RewardError(f"{job.label} failed"))
        else:
            job.on_failure(RolloutError(f"{job.label} failed"))


class Loop:
    """One run of an agent loop."""

    def __init__(self, job: WorkerJob, item: dict[str, Any], path: int) -> None:
        self.job = job
        self.sample_id: str = item["sample_id"]
        self.session: int = item["session"]
        self.path = path  # another path has other tools' answers
        self.context: list[int] = item["tokens"].tolist()
        if path == 2:
            self.context = [GIVEN_FROM + 500]  # a prompt of its own
        self.seen: list[int] = []  # the last context with what was generated from it
        self.num_turns = 0
        self.task: asyncio.Task[dict[str, Any]] | None = None

    @property
    def is_free(self) -> bool:
        """It does not wait for engines."""
        return self.task is None or self.task.done()

    @property
    def limit(self) -> int | None:
        """The context of the next generation; the same whenever the loop runs again."""
        return (4, 3, None)[self.num_turns % 3]

    def heard(self, tokens: list[int]) -> None:
        self.seen = [*self.context, *tokens]
        self.num_turns += 1
        given = [GIVEN_FROM + 10 * self.path + self.num_turns] * (self.num_turns % 3)
        self.context = [*self.seen, *given]


class Life:
    """The objects of one manager, on the ledger's folder."""

    def __init__(self, folder: Path, config: RolloutConfig) -> None:
        self.config = config
        self.failures: list[UmbraError] = []
        self.groups: dict[int, Group] = {}  # by order_idx, the latest made
        self.engines: list[Engine] = []
        self.loops: list[Loop] = []
        self.ghosts: list[Loop] = []  # count as dead
        self.tasks: list[asyncio.Task[dict[str, Any]]] = []
        self.workers = Workers()
        self.evaluation: Evaluated | None = None  # the last outcome
        self.recorder = Recorder(folder, self.failures.append)
        self.router = Router(3, 3)
        self.dispatcher = Dispatcher(self.router, self.failures.append, self.recorder)
        self.sessions = AgentSessions(self.dispatcher, self.recorder)
        pool: Any = self.workers
        self.runner = GroupRunner(
            config, self.dispatcher, self.sessions, pool, self.recorder, "manager"
        )
        self.flow = TrainingFlow(
            config.settings,
            self,  # pyright: ignore[reportArgumentType]
            self.runner,
            self.recorder,
            self.dispatcher,
            self.failures.append,
            lambda text: None,
        )
        self.learn = self.flow.learn

    # as Admission
    num_prompts = 1

    def training_group(self, order_idx: int) -> Group:
        config = self.config
        prompt = Prompt(f"p{order_idx}", "", np.asarray([2000 + order_idx, 1, 2], np.int32), {})
        samples = [
            Trajectory(
                f"e0/p{order_idx}/{k}",
                prompt,
                order_idx * 10 + k,
                budget=config.settings.max_new_tokens,
                max_context_len=config.dispatch.max_context_len,
            )
            for k in range(config.settings.group_size)
        ]
        self.groups[order_idx] = Group(f"e0/p{order_idx}", samples, order_idx)
        return self.groups[order_idx]

    def epoch_of(self, order_idx: int) -> int:
        return 0

    def sample(self, sample_id: str) -> Trajectory:
        held = [sample for group in self.groups.values() for sample in group.trajectories]
        return next(sample for sample in held if sample.sample_id == sample_id)

    async def recover(self, restored: Restored | None, needs: str) -> None:
        """Does the same as RolloutManager."""
        self.flow.abandon()
        state = await self.recorder.recover(restored, needs)
        assert state is not None
        for version, step in state.versions.items():
            self.flow.versions.learn(version, step)
        self.evaluation = state.evaluation
        recovered = recover_groups(state, self.training_group)
        for sample, records in recovered.records.items():
            self.sessions.remember(sample, records)
        self.flow.restore(recovered)
        if restored is not None:
            await self.recorder.durable()

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        with contextlib.suppress(LedgerError):  # a later incarnation has begun
            await self.recorder.__aexit__(None, None, None)


async def finish_all(life: Life, engine: Engine) -> None:
    """Everything that is open is generated and scored."""
    chance = random.Random(1)
    while engine.requests or engine.outbox or life.workers.queue:
        engine.tick(chance)
        while engine.outbox:
            life.dispatcher.on_batch(engine.engine_id, engine.outbox.popleft())
        while life.workers.queue:
            life.workers.queue.pop().on_result({"rewards": [0.0, 1.0], "parts": {}})
        await asyncio.sleep(0)
