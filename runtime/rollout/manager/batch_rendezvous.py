"""Batches and evaluations: the ranks ask for them together, and are answered together.

    each rank: next_batch / evaluate --join--> RankRendezvous --answer--> disk --deliver--> ranks

One collective call is in progress at a time. Every event that may change its outcome
ends in `answer()`.

A manager that dies while it answers leaves the ranks apart: some have the answer and continue, the
others repeat the call to its successor, one by one.

    batch        Its lease is in the ledger, so a rank that asks again gets its part alone. The
                 others cannot finish the step without it.
    evaluation   Its outcome is in the ledger and is returned likewise. The others wait in a later
                 call.
    sync_wanted  The others wait in `sync_begin` of the current version, which the supervisor knows.
                 While ranks are missing from a call, the manager asks the supervisor, and sends the
                 ranks that wait here after the others (`CatchUp`).
    an error     It ends the ranks that received it, and so the job.
    none yet     No rank has an answer before it is on disk, so all ask again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from umbra.runtime.errors import DeadlineExceeded, RewardError, RolloutError, UmbraError
from umbra.runtime.rollout.dispatch.engine_fleet import Fleet
from umbra.runtime.rollout.dispatch.router import EngineId
from umbra.runtime.rollout.dispatch.trajectory import Group
from umbra.runtime.rollout.ledger.ledger_events import Evaluated
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.manager.admission import Admission
from umbra.runtime.rollout.manager.batch_answers import BatchAnswers, evaluation_outcome
from umbra.runtime.rollout.manager.evaluation import Evaluation
from umbra.runtime.rollout.manager.group_runner import GroupRunner
from umbra.runtime.rollout.manager.rank_rendezvous import CollectiveCall, RankRendezvous
from umbra.runtime.rollout.manager.training_flow import TrainingFlow
from umbra.runtime.rollout.rollout_config import RolloutConfig
from umbra.runtime.rpc.rpc_client import Handle
from umbra.runtime.waiting import Alarm

logger = logging.getLogger(__name__)

_CATCH_UP_TIMEOUT_S: Final = 10.0
"""Deadline for the supervisor's answer, which comes from memory."""


class BatchRendezvous:
    """Owns the call in progress, the evaluation it may need, and the waiting ranks.

    Args:
        name: of the manager; its log file has the same name.
        flow_changed: set by `flow` when a batch may have become complete.
        learn: called with the version and the step of each batch that is asked for.
        on_failure: called with an error that makes an answer impossible; must lead to `fail`.
    """

    def __init__(
        self,
        name: str,
        config: RolloutConfig,
        supervisor: Handle,
        *,
        admission: Admission,
        runner: GroupRunner,
        flow: TrainingFlow,
        fleet: Fleet,
        recorder: Recorder,
        flow_changed: asyncio.Event,
        learn: Callable[[int, int], None],
        on_failure: Callable[[UmbraError], None],
    ) -> None:
        self.failure: UmbraError | None = None
        self._name = name
        self._config = config
        self._admission = admission
        self._runner = runner
        self._flow = flow
        self._fleet = fleet
        self._recorder = recorder
        self._flow_changed = flow_changed
        self._learn = learn
        self._on_failure = on_failure
        pool = config.dispatch.pool
        self._catch_up = CatchUp(supervisor, pool, self._waiting_ranks, self._ask_for_sync)
        self._ranks = RankRendezvous(config.world_size, config.rank_timeout_s, self._catch_up.look)
        self._starving = Alarm(config.dispatch.engine_timeout_s, self._on_starved)
        self._call: CollectiveCall | None = None
        self._batch: BatchAnswers | None = None
        self._evaluation: Evaluation | None = None
        self._last_evaluation: Evaluated | None = None
        self._has_work = False
        self._num_answers = 0
        self._num_delivered = 0
        self._to_deliver: asyncio.Queue[tuple[CollectiveCall, list[dict[str, Any]]]] = (
            asyncio.Queue()
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._catch_up.run())
            tasks.create_task(self._follow_flow())
            tasks.create_task(self._deliver())

    async def _follow_flow(self) -> None:
        while True:
            await self._flow_changed.wait()
            self._flow_changed.clear()
            self.answer()

    def close(self) -> None:
        self._starving.watch(False)

    def progress(self) -> dict[str, Any]:
        return {
            "call": str(self._call) if self._call else None,
            "waiting_ranks": self._ranks.waiting_ages_s(),
            "evaluation": self._evaluation.progress() if self._evaluation else None,
            "batches_delivered": self._num_delivered,
        }

    async def join(self, rank: int, call: CollectiveCall) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        lost = await self._lost_answer(rank, call)
        if lost is not None:
            return lost
        slot = self._ranks.arrive(rank, call)
        try:
            if self._call != call:
                self._begin(call)
        except UmbraError as error:
            self._on_failure(error)
        self.answer()
        return await self._ranks.wait(rank, slot)

    async def _lost_answer(self, rank: int, call: CollectiveCall) -> dict[str, Any] | None:
        """The earlier answer for a rank that it did not reach; the others have continued."""
        last = self._last_evaluation
        if last is not None and call == CollectiveCall("evaluate", last.step, last.temperature):
            return dict(last.outcome)
        if call.version is None or self._flow.leased(call.step) is None:
            return None
        await self._recorder.durable()
        groups = self._flow.leased(call.step)
        if groups is None or self._call == call:
            return None
        self._learn(call.version, call.step)
        self._flow.advance(call.step)
        return self._batch_answers(groups).of(rank)

    def _begin(self, call: CollectiveCall) -> None:
        """Starts the work for a call. An evaluation that no rank waits for is dropped."""
        self._drop_evaluation()
        self._call, self._batch = call, None
        if call.version is not None:
            self._learn(call.version, call.step)
            self._flow.advance(call.step)
            return
        self._evaluation = Evaluation(
            self._admission.evaluation_groups(),
            self._runner,
            self._config.eval_sampling(call.temperature),
            on_done=self.answer,
            on_failure=lambda error: self._on_failed_evaluation(call, error),
        )
        self._evaluation.begin()

    def restore(self, evaluation: Evaluated | None) -> None:
        """Replaces the work in progress by the ledger's last evaluation."""
        self._drop_evaluation()
        self._last_evaluation = evaluation

    def _drop_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.abandon()
            self._evaluation = None

    def on_pool_change(self) -> None:
        self._catch_up.observe(self._fleet.pending)
        self.answer()

    def on_work(self, has_work: bool) -> None:
        self._has_work = has_work
        self._watch_engines()

    def _watch_engines(self) -> None:
        """Limits how long work may wait for engines; without work, other deadlines apply."""
        is_waiting = self._call is not None and self._has_work and self.failure is None
        self._starving.watch(is_waiting and not self._fleet.is_serving)

    def answer(self) -> None:
        """Answers the ranks if all are waiting and the outcome is complete."""
        self._watch_engines()
        if self._call is None or self.failure is not None or not self._ranks.is_full:
            return
        try:
            answers = self._outcome(self._call)
        except UmbraError as error:
            self._on_failure(error)
            return
        if answers is not None:
            self._to_deliver.put_nowait((self._call, answers))
            self._call = None
            self._num_delivered += 1
            self._starving.watch(False)
        elif self._fleet.pending:
            self._catch_up.look()

    def _outcome(self, call: CollectiveCall) -> list[dict[str, Any]] | None:
        """One answer per rank; None while it is not complete."""
        if call.version is not None:
            groups = self._flow.take(call.step)
            if groups is None:
                return None
            answers = self._batch_answers(groups)
            return [answers.of(rank) for rank in range(self._config.world_size)]
        evaluation = self._evaluation
        if evaluation is None or not evaluation.is_done:
            return None
        self._evaluation = None
        outcome = evaluation_outcome(evaluation, self._config)
        self._recorder.evaluated(call.step, call.temperature, outcome)
        return [outcome] * self._config.world_size

    def _batch_answers(self, groups: list[Group]) -> BatchAnswers:
        """The answers of the leased batch; kept until the next call begins."""
        if self._batch is None or self._batch.groups is not groups:
            self._batch = BatchAnswers(groups, self._config, self._flow.metrics(groups))
        return self._batch

    async def _deliver(self) -> None:
        """Delivers answers once the ledger has them on disk."""
        while True:
            call, answers = await self._to_deliver.get()
            try:
                await self._recorder.durable()
            except UmbraError as error:
                self._on_failure(error)
                continue
            if call.version is None:
                self._last_evaluation = Evaluated(call.step, call.temperature, answers[0])
            self._num_answers += 1
            self._ranks.give(call, answers)

    def fail(self, error: UmbraError) -> None:
        """Fails this and all later calls of every rank."""
        self.failure = error
        self._starving.watch(False)
        self._ranks.fail(error)

    def _on_failed_evaluation(self, call: CollectiveCall, error: UmbraError) -> None:
        message = (
            f"the evaluation after step {call.step} failed, and with it the run "
            f"(rollout.max_failed_share only covers prompts that are trained on): {error}; "
            f"logs/{self._name}.log has the earlier failures"
        )
        is_reward = isinstance(error, RewardError)
        self._on_failure(RewardError(message) if is_reward else RolloutError(message))

    def _waiting_ranks(self) -> Waiting | None:
        if self._call is None or not self._ranks.waiting:
            return None
        ranks = self._ranks
        return Waiting(self._call, self._num_answers, ranks.waiting, ranks.is_full)

    def _ask_for_sync(self, answer: dict[str, Any]) -> None:
        assert self._call is not None
        self._num_answers += 1
        self._ranks.give(self._call, [answer] * self._config.world_size)

    def _on_starved(self) -> None:
        remedy = "publish weights and wake the pool, or see the engines' logs"
        if not self._fleet.views:
            remedy = "start a machine that generates (python -m umbra.runtime.node), or raise count"
        self._on_failure(
            RolloutError(
                f"no engine of pool {self._config.dispatch.pool!r} has served for "
                f"{self._config.dispatch.engine_timeout_s:.3g} s while {self._call} waits "
                f"({self._fleet.describe()}): {remedy}"
            )
        )


class SyncRequests:
    """Remembers which engines were reported to the ranks, so that no sync is requested twice. An
    engine is reported once for as long as it stays PENDING_WEIGHTS, and again if it leaves that
    state and comes back (after a sync that failed)."""

    def __init__(self) -> None:
        self._requested: set[EngineId] = set()

    def take_new(self, pending: Iterable[EngineId]) -> list[EngineId]:
        """The engines without weights that were not returned before."""
        lacking = set(pending)
        self._requested &= lacking
        fresh = sorted(lacking - self._requested)
        self._requested.update(fresh)
        return fresh

    def observe(self, pending: Iterable[EngineId]) -> None:
        """Forgets engines that have weights now; must be called on every change of state."""
        self._requested &= set(pending)


class Waiting(NamedTuple):
    """The ranks that wait for one answer, by its number; `is_complete` if no rank is missing."""

    call: CollectiveCall
    answer: int
    ranks: frozenset[int]
    is_complete: bool


class CatchUp:
    """Asks the supervisor which engines lack weights, and the waiting ranks to publish to them.

    The manager's view of the pool may be older than the ranks' latest sync (one that has ended
    passes through PENDING_WEIGHTS), so the supervisor decides.

    The supervisor also knows which ranks already wait for the others in `sync_begin` of the current
    version. A rank that waits here at that time missed the answer that sent the others there, and
    gets it now: without it that sync cannot continue. Ranks publish other versions on their own,
    all together, so this concerns the current version only.

    `waiting` returns the ranks that wait now, or None; `answer` sends one answer to all of them,
    unless their set has changed since the supervisor was asked.
    """

    def __init__(
        self,
        supervisor: Handle,
        pool: str,
        waiting: Callable[[], Waiting | None],
        answer: Callable[[dict[str, Any]], None],
    ) -> None:
        self._supervisor = supervisor
        self._pool = pool
        self._waiting = waiting
        self._answer = answer
        self._requests = SyncRequests()
        self._lacking = asyncio.Event()

    def observe(self, pending: Iterable[EngineId]) -> None:
        """Takes the engines without weights; must be called on every change of state."""
        self._requests.observe(pending)

    def look(self) -> None:
        """Starts a check: engines seem to lack weights while ranks wait, or ranks are missing."""
        self._lacking.set()

    async def run(self) -> None:
        while True:
            await self._lacking.wait()
            self._lacking.clear()
            waiting = self._waiting()
            try:
                lack = await self._supervisor.call(
                    "catch_up", self._pool, timeout_s=_CATCH_UP_TIMEOUT_S
                )
            except DeadlineExceeded as error:
                logger.warning("the supervisor is slow to answer; asking again: %s", error)
                self._lacking.set()
                continue
            if waiting is None or waiting != self._waiting():
                continue
            reason = self._reason(waiting, lack)
            if reason:
                logger.info("asking the ranks for version %d: %s", lack["version"], reason)
                self._answer({"kind": "sync_wanted", "version": lack["version"]})

    def _reason(self, waiting: Waiting, lack: Mapping[str, Any]) -> str:
        """Why the ranks should publish the current version once more; "" if they should not."""
        if lack["ranks"]:
            is_apart = waiting.ranks.isdisjoint(lack["ranks"])
            return f"ranks {lack['ranks']} wait for them in its sync" if is_apart else ""
        if not waiting.is_complete:
            return ""
        engines = self._requests.take_new(
            EngineId(name, number) for name, number in lack["engines"]
        )
        return f"{', '.join(map(str, engines))} came up without weights" if engines else ""
