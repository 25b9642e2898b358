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
    sync_wanted  The others wait in `SyncBegin` of the current version, which the supervisor knows.
                 While ranks are missing from a call, the manager asks the supervisor, and sends the
                 ranks that wait here after the others (`_request_syncs`).
    an error     It ends the ranks that received it, and so the job.
    none yet     No rank has an answer before it is on disk, so all ask again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from umbra.runtime.actor.actor_spec import ActorContext
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
from umbra.runtime.waiting import Alarm

logger = logging.getLogger(__name__)

_Delivery = tuple[CollectiveCall, list[dict[str, Any]]]
"""A call, and each rank's answer."""

_CATCH_UP_TIMEOUT_S: Final = 10.0
"""Deadline for the supervisor's answer, which comes from memory."""


class BatchRendezvous:
    """Owns the call in progress, the evaluation it may need, and the waiting ranks. A `GroupOwner`
    of the evaluation's groups.

    Attributes:
        failure: the error that ended all rollouts.
    """

    def __init__(
        self,
        config: RolloutConfig,
        context: ActorContext,
        admission: Admission,
        runner: GroupRunner,
        flow: TrainingFlow,
        fleet: Fleet,
        recorder: Recorder,
    ) -> None:
        self.failure: UmbraError | None = None
        self._config = config
        self._context = context
        self._admission = admission
        self._runner = runner
        self._flow = flow
        self._fleet = fleet
        self._recorder = recorder
        self._sync_requests = SyncRequests()
        self._ranks = RankRendezvous(config.world_size, config.rank_timeout_s)
        self._starving = Alarm(config.dispatch.engine_timeout_s, self._on_starved)
        self._call: CollectiveCall | None = None
        self._batch: BatchAnswers | None = None
        self._evaluation: Evaluation | None = None
        self._last_evaluation: Evaluated | None = None
        self._has_work = False
        self._num_answers = 0
        self._num_delivered = 0
        self._to_deliver: asyncio.Queue[_Delivery] = asyncio.Queue()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._request_syncs())
            tasks.create_task(self._follow_flow())
            tasks.create_task(self._deliver())

    async def _follow_flow(self) -> None:
        while True:
            await self._flow.changed.wait()
            self._flow.changed.clear()
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
            self.fail(error)
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
        self._flow.learn(call.version, call.step)
        self._flow.advance(call.step)
        return self._batch_answers(groups).of(rank)

    def _begin(self, call: CollectiveCall) -> None:
        """Starts the work for a call. An evaluation that no rank waits for is dropped, unless it
        runs beside batches."""
        self._call, self._batch = call, None
        if call.version is not None:
            if self._evaluation is not None and not self._evaluation.runs_beside:
                self._drop_evaluation()
            self._flow.learn(call.version, call.step)
            self._flow.advance(call.step)
        elif self._evaluation is None or self._evaluation.call != call:
            self._evaluate(call)

    def begin_evaluation(self, step: int, temperature: float) -> None:
        """Generates beside batches for an evaluation that all ranks will ask for."""
        call = CollectiveCall("evaluate", step, temperature)
        if self.failure is None and (self._evaluation is None or self._evaluation.call != call):
            self._evaluate(call, runs_beside=True)

    def _evaluate(self, call: CollectiveCall, *, runs_beside: bool = False) -> None:
        self._drop_evaluation()
        groups = self._admission.evaluation_groups()
        self._evaluation = Evaluation(call, groups, runs_beside=runs_beside)
        for group in groups:
            self._runner.start(group, self._config.eval_sampling(call.temperature), self)

    def restore(self, evaluation: Evaluated | None) -> None:
        """Replaces the work in progress by the ledger's last evaluation."""
        self._drop_evaluation()
        self._last_evaluation = evaluation

    def _drop_evaluation(self) -> None:
        if self._evaluation is not None:
            for group in self._evaluation.groups:
                self._runner.abandon(group)
            self._evaluation = None

    def on_scored(self, group: Group) -> None:
        assert self._evaluation is not None, group.group_id
        self._evaluation.on_scored()
        if self._evaluation.is_done:
            self.answer()

    def on_failed(self, group: Group, error: UmbraError) -> None:
        assert self._evaluation is not None, group.group_id
        message = (
            f"the evaluation after step {self._evaluation.call.step} failed, and with it the run "
            f"(rollout.max_failed_share only covers prompts that are trained on): {error}; "
            f"logs/{self._context.name}.log has the earlier failures"
        )
        self._drop_evaluation()
        is_reward = isinstance(error, RewardError)
        self.fail(RewardError(message) if is_reward else RolloutError(message))

    def on_pool_change(self) -> None:
        self._sync_requests.observe(self._fleet.pending)
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
            self.fail(error)
            return
        if answers is not None:
            self._to_deliver.put_nowait((self._call, answers))
            self._call = None
            self._num_delivered += 1
            self._starving.watch(False)
        elif self._fleet.pending:
            self._ranks.lacking.set()

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
            config, metrics = self._config, self._flow.metrics(groups)
            self._batch = BatchAnswers(groups, config.layout, config.world_size, metrics)
        return self._batch

    async def _deliver(self) -> None:
        """Delivers answers once the ledger has them on disk."""
        while True:
            call, answers = await self._to_deliver.get()
            try:
                await self._recorder.durable()
            except UmbraError as error:
                self.fail(error)
                continue
            if call.version is None:
                self._last_evaluation = Evaluated(call.step, call.temperature, answers[0])
            self._num_answers += 1
            self._ranks.give(call, answers)

    def fail(self, error: UmbraError) -> None:
        """Ends all rollouts: every rank gets the first error, in this and all later calls."""
        if self.failure is not None:
            return
        logger.error("rollouts failed: %s", error)
        self.failure = error
        self._starving.watch(False)
        self._ranks.fail(error)
        self._flow.abandon()
        self._runner.abandon_all()

    async def _request_syncs(self) -> None:
        """Asks the supervisor which engines lack weights, and the waiting ranks to publish to them.

        The manager's view of the pool may be older than the ranks' latest sync (one that has ended
        passes through PENDING_WEIGHTS), so the supervisor decides. It also knows which ranks
        already wait for the others in `SyncBegin` of the current version. A rank that waits here
        at that time missed the answer that sent the others there, and gets it now: without it that
        sync cannot continue. Ranks publish other versions on their own, all together, so this
        concerns the current version only.
        """
        pool = self._config.dispatch.pool
        while True:
            await self._ranks.lacking.wait()
            self._ranks.lacking.clear()
            waiting = self._waiting()
            try:
                lack = await self._context.supervisor.call(
                    "catch_up", pool, timeout_s=_CATCH_UP_TIMEOUT_S
                )
            except DeadlineExceeded as error:
                logger.warning("the supervisor is slow to answer; asking again: %s", error)
                self._ranks.lacking.set()
                continue
            if self._call is None or not self._ranks.waiting or waiting != self._waiting():
                continue
            if reason := self._sync_reason(lack):
                logger.info("asking the ranks for version %d: %s", lack["version"], reason)
                answer = {"kind": "sync_wanted", "version": lack["version"]}
                self._num_answers += 1
                self._ranks.give(self._call, [answer] * self._config.world_size)

    def _waiting(self) -> tuple[object, ...]:
        """Changes when a rank comes, leaves or is answered."""
        return self._call, self._num_answers, self._ranks.waiting

    def _sync_reason(self, lack: Mapping[str, Any]) -> str:
        """Why the ranks should publish the current version once more; "" if they should not."""
        if lack["ranks"]:
            is_apart = self._ranks.waiting.isdisjoint(lack["ranks"])
            return f"ranks {lack['ranks']} wait for them in its sync" if is_apart else ""
        if not self._ranks.is_full:
            return ""
        engines = self._sync_requests.take_new(
            EngineId(name, number) for name, number in lack["engines"]
        )
        return f"{', '.join(map(str, engines))} came up without weights" if engines else ""

    def _on_starved(self) -> None:
        remedy = "publish weights and wake the pool, or see the engines' logs"
        if not self._fleet.views:
            remedy = "start a machine that generates (python -m umbra.runtime.node), or raise count"
        self.fail(
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
