"""Batches and evaluations: the ranks ask for them together, and are answered together.

    each rank: next_batch / evaluate --join--> RankRendezvous --answer--> disk --deliver--> ranks

One round is under way at a time. Whatever may have changed its outcome ends in `answer()`.

A manager that dies while it answers leaves the ranks apart: some have the answer and go on, the
others ask its successor for the same again, one by one.

    batch        its lease is in the ledger; a rank that asks again gets its part alone. The others
                 cannot finish the step without it.
    evaluation   its outcome is in the ledger, and given likewise. The others wait in a later round.
    sync_wanted  the others wait in `sync_begin` of the current version, which the supervisor knows:
                 a round that lacks ranks asks it, and who waits is sent after them (`CatchUp`).
    an error     ends the ranks that have it, and so the job.
    none yet     on disk: no rank has it, all ask again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from umbra.runtime.errors import RewardError, RolloutError, UmbraError
from umbra.runtime.rollout.alarm import Alarm
from umbra.runtime.rollout.buffer.admission import Admission
from umbra.runtime.rollout.dispatch.engine_fleet import Fleet
from umbra.runtime.rollout.ledger.ledger_events import Evaluated
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.manager.catch_up import CatchUp, Waiting
from umbra.runtime.rollout.manager.evaluation import Evaluation
from umbra.runtime.rollout.manager.group_runner import GroupRunner
from umbra.runtime.rollout.manager.rank_answers import batch_answers, evaluation_outcome
from umbra.runtime.rollout.manager.rank_rendezvous import CollectiveCall, RankRendezvous
from umbra.runtime.rollout.manager.training_flow import TrainingFlow
from umbra.runtime.rollout.rollout_config import RolloutConfig
from umbra.runtime.rpc.rpc_client import Handle


class BatchRendezvous:
    """Owns the round under way, the evaluation it may need, and who waits for it.

    Args:
        name: of the manager, which its log has too.
        flow_changed: set by `flow` when a batch may have become complete.
        learn: told the version and the step of each batch that is asked for.
        on_failure: told of what makes an answer impossible; to end in `fail`.
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
        self._catch_up = CatchUp(supervisor, pool, self._who_waits, self._ask_for_sync)
        self._ranks = RankRendezvous(config.world_size, config.rank_timeout_s, self._catch_up.look)
        self._starving = Alarm(config.dispatch.engine_timeout_s, self._on_starved)
        self._round: CollectiveCall | None = None
        self._evaluation: Evaluation | None = None
        self._last_evaluation: Evaluated | None = None
        self._has_work = False
        self._num_answers = 0
        self._num_delivered = 0
        self._to_deliver: asyncio.Queue[tuple[CollectiveCall, list[dict[str, Any]]]] = (
            asyncio.Queue()
        )

    async def run(self) -> None:
        """Lives until cancelled."""
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
        """For `stats()`."""
        return {
            "round": str(self._round) if self._round else None,
            "evaluation": self._evaluation.progress() if self._evaluation else None,
            "batches_delivered": self._num_delivered,
        }

    # -- what the ranks ask --------------------------------------------------------------

    async def join(self, rank: int, wanted: CollectiveCall) -> dict[str, Any]:
        """A rank's answer; see `RolloutManager.next_batch` and `evaluate`."""
        if self.failure is not None:
            raise self.failure
        lost = await self._lost_answer(rank, wanted)
        if lost is not None:
            return lost
        slot = self._ranks.arrive(rank, wanted)
        try:
            if self._round != wanted:
                self._begin(wanted)
        except UmbraError as error:
            self._on_failure(error)
        self.answer()
        return await self._ranks.wait(rank, slot)

    async def _lost_answer(self, rank: int, wanted: CollectiveCall) -> dict[str, Any] | None:
        """What was answered before, for a rank that it did not reach: the others have gone on."""
        last = self._last_evaluation
        if last is not None and wanted == CollectiveCall("evaluate", last.step, last.temperature):
            return dict(last.outcome)
        if wanted.version is None or self._flow.leased(wanted.step) is None:
            return None
        await self._recorder.durable()
        groups = self._flow.leased(wanted.step)
        if groups is None or self._round == wanted:
            return None
        self._learn(wanted.version, wanted.step)
        self._flow.advance(wanted.step)
        flow = self._flow
        return batch_answers(groups, self._config, flow.gen_s, flow.metrics(groups))[rank]

    def _begin(self, wanted: CollectiveCall) -> None:
        """Starts a round's work. An evaluation that was not waited for to the end is dropped."""
        self._drop_evaluation()
        self._round = wanted
        if wanted.version is not None:
            self._learn(wanted.version, wanted.step)
            self._flow.advance(wanted.step)
            return
        self._evaluation = Evaluation(
            self._admission.evaluation_groups(),
            self._runner,
            wanted.temperature,
            on_done=self.answer,
            on_failure=lambda error: self._on_failed_evaluation(wanted, error),
        )
        self._evaluation.begin()

    def restore(self, evaluation: Evaluated | None) -> None:
        """What the ranks got last, as the ledger has it, in place of what is under way."""
        self._drop_evaluation()
        self._last_evaluation = evaluation

    def _drop_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.abandon()
            self._evaluation = None

    # -- what they get -------------------------------------------------------------------

    def on_pool_change(self) -> None:
        self._catch_up.observe(self._fleet.pending)
        self.answer()

    def on_work(self, has_work: bool) -> None:
        """The engines have something to generate, or nothing any more."""
        self._has_work = has_work
        self._watch_engines()

    def _watch_engines(self) -> None:
        """Work must not wait for them for ever. Without any it is others that are waited for."""
        is_wanted = self._round is not None and self._has_work and self.failure is None
        self._starving.watch(is_wanted and not self._fleet.is_serving)

    def answer(self) -> None:
        """Answers the ranks, if all are here and there is something to say."""
        self._watch_engines()
        if self._round is None or self.failure is not None or not self._ranks.is_full:
            return
        try:
            answers = self._outcome(self._round)
        except UmbraError as error:
            self._on_failure(error)
            return
        if answers is not None:
            self._to_deliver.put_nowait((self._round, answers))
            self._round = None
            self._num_delivered += 1
            self._starving.watch(False)
        elif self._fleet.pending:
            self._catch_up.look()

    def _outcome(self, wanted: CollectiveCall) -> list[dict[str, Any]] | None:
        """What the ranks get, one each; None while it is not complete."""
        if wanted.version is not None:
            groups = self._flow.take(wanted.step)
            if groups is None:
                return None
            flow = self._flow
            return batch_answers(groups, self._config, flow.gen_s, flow.metrics(groups))
        evaluation = self._evaluation
        if evaluation is None or not evaluation.is_done:
            return None
        self._evaluation = None
        outcome = evaluation_outcome(evaluation, self._config)
        self._recorder.evaluated(wanted.step, wanted.temperature, outcome)
        return [outcome] * self._config.world_size

    async def _deliver(self) -> None:
        """Hands answers out once it is on disk that they were."""
        while True:
            wanted, answers = await self._to_deliver.get()
            try:
                await self._recorder.durable()
            except UmbraError as error:
                self._on_failure(error)
                continue
            if wanted.version is None:
                self._last_evaluation = Evaluated(wanted.step, wanted.temperature, answers[0])
            self._num_answers += 1
            self._ranks.give(wanted, answers)

    def fail(self, error: UmbraError) -> None:
        """Every rank gets the error, now and in later calls."""
        self.failure = error
        self._starving.watch(False)
        self._ranks.fail(error)

    # -- private -------------------------------------------------------------------------

    def _on_failed_evaluation(self, wanted: CollectiveCall, error: UmbraError) -> None:
        said = (
            f"the evaluation after step {wanted.step} failed, and with it the run "
            f"(rollout.max_failed_share is for prompts that are trained on): {error}; "
            f"logs/{self._name}.log has what failed before that"
        )
        is_reward = isinstance(error, RewardError)
        self._on_failure(RewardError(said) if is_reward else RolloutError(said))

    def _who_waits(self) -> Waiting | None:
        if self._round is None or not self._ranks.waiting:
            return None
        ranks = self._ranks
        return Waiting(self._round, self._num_answers, ranks.waiting, ranks.is_full)

    def _ask_for_sync(self, answer: dict[str, Any]) -> None:
        assert self._round is not None
        self._num_answers += 1
        self._ranks.give(self._round, [answer] * self._config.world_size)

    def _on_starved(self) -> None:
        self._on_failure(
            RolloutError(
                f"no engine of pool {self._config.dispatch.pool!r} has served for "
                f"{self._config.dispatch.engine_timeout_s:.3g} s while {self._round} waits "
                f"({self._fleet.describe()}): publish weights and wake the pool, or see the "
                "engines' logs"
            )
        )
