"""The rollout manager: an actor that turns prompts into scored, balanced batches.

    ranks --next_batch--> BatchRendezvous     Admission -> TrainingFlow -> GroupRunner -> Dispatcher
                            ^                          |               |           -> engines
                            +-- batch | sync_wanted <--+               +-> WorkerPool
                                                                        -> rewards, agents

Runs on one loop without locks: the parts call each other.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.actor.actor_spec import actor_context, idempotent
from umbra.runtime.errors import RolloutError, UmbraError, first_leaf
from umbra.runtime.rollout.agents.agent_sessions import AgentSessions
from umbra.runtime.rollout.agents.worker_pool import WorkerPool
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher
from umbra.runtime.rollout.dispatch.engine_fleet import Fleet
from umbra.runtime.rollout.dispatch.generator import OperatorMessages
from umbra.runtime.rollout.dispatch.pool_load import PoolLoad
from umbra.runtime.rollout.dispatch.router import Router
from umbra.runtime.rollout.ledger.ledger_events import Restored
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.manager.admission import Admission
from umbra.runtime.rollout.manager.batch_rendezvous import BatchRendezvous
from umbra.runtime.rollout.manager.group_recovery import Recovered, recover_groups
from umbra.runtime.rollout.manager.group_runner import GroupRunner
from umbra.runtime.rollout.manager.rank_rendezvous import CollectiveCall
from umbra.runtime.rollout.manager.teacher import PolicyScorer, PoolScorer, Teacher
from umbra.runtime.rollout.manager.training_flow import TrainingFlow
from umbra.runtime.rollout.rollout_config import RolloutConfig
from umbra.runtime.settings import from_wire
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.runtime.text.stop_texts import StopTexts
from umbra.runtime.tracing.spans import gauge

logger = logging.getLogger(__name__)

_POOL_S: Final = 10.0
"""Deadline for the supervisor to report whether there is a pool; it answers from memory."""


class RolloutManager:
    """Owns all groups of its node, from prompt to delivered batch. An actor. An error that makes a
    batch impossible is final: every rank gets it, now and in later calls."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = rollout = from_wire(RolloutConfig, config)
        settings, dispatch = rollout.settings, rollout.dispatch
        self._context = context = actor_context()
        self._messages = OperatorMessages(context)
        self._admission = Admission(rollout)
        self._recorder = recorder = Recorder(
            rollout.ledger_folder, self._fail, settings.ledger_gb * 1e9
        )
        self._pool_load = PoolLoad(context.supervisor, dispatch.pool)
        self._dispatcher = dispatcher = Dispatcher(
            Router(dispatch.max_inflight_per_engine, dispatch.max_running_per_engine),
            self._fail,
            recorder,
            on_work=self._on_work,
        )
        self._sessions = AgentSessions(dispatcher, recorder, dispatch.vocab_size)
        self._workers = WorkerPool(rollout, context, self._fail)
        self._fleet = Fleet(dispatch, context, dispatcher, self._messages.put)
        self._teacher = None
        if rollout.teacher:
            scorer = PoolScorer(rollout.teacher, context, settings.timeout_s)
            if rollout.teacher == dispatch.pool:
                scorer = PolicyScorer(dispatcher, dispatch.max_context_len, settings.timeout_s)
            self._teacher = Teacher(scorer, self._fail)
        self._runner = GroupRunner(
            rollout, dispatcher, self._sessions, self._workers, recorder, context.name,
            self._teacher,
        )  # fmt: skip
        self._flow = TrainingFlow(
            settings, self._admission, self._runner, recorder, dispatcher, self._fail,
            self._messages.put,
        )  # fmt: skip
        self._rendezvous = BatchRendezvous(
            rollout, context, self._admission, self._runner, self._flow, self._fleet, recorder
        )
        gauge("turns", lambda: {"waiting for engines": self._dispatcher.num_waiting})
        self._called = asyncio.Event()
        self._recovering = asyncio.Lock()
        self._is_recovered = False

    async def __aenter__(self) -> Self:
        await self._recorder.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._rendezvous.close()
        await self._recorder.__aexit__(*exc_info)
        self._admission.close()

    async def run(self) -> None:
        """Owns every task of the manager; runs until the actor is stopped."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._messages.run())
            tasks.create_task(self._recorder.run())
            if self._context.num_restarts:
                tasks.create_task(self._resume())
            await self._called.wait()  # the pool and the workers may be created after the manager
            tasks.create_task(self._workers.run())
            if self._teacher is not None:
                tasks.create_task(self._teacher.run())
            tasks.create_task(self._follow_pool())
            tasks.create_task(self._rendezvous.run())
            if self._config.dispatch.shares_memory:
                tasks.create_task(self._pool_load.run())

    @idempotent
    async def begin(self, step: int, version: int, position: str = "") -> dict[str, int]:
        """Starts or resumes training from the checkpoint after `step` steps.

        One rank calls it, before all other calls. Groups that were leased or generated after
        that checkpoint are taken back. Without this call, a manager that was killed
        continues where it was.

        Args:
            version: the newest when the checkpoint was made.
            position: of the ledger, as stored in the checkpoint; "" if it has none.

        Returns {"groups", "tokens", "version"}: groups and tokens that exist already and need not
        be generated again, and the newest version that was ever announced. Raises LedgerError if
        the ledger ends before the position, is damaged, or belongs to another data set.
        """
        async with self._recovering:
            kept = await self._recover(Restored(step, version), position)
            await self._recorder.durable()  # a manager that dies now must not lose the restoring
            return kept

    @idempotent
    async def announce(self, version: int, step: int) -> None:
        """The weights after `step` steps will be `version`. One rank calls it before publishing."""
        await self._ensure_recovered()
        self._flow.learn(version, step)
        await self._recorder.durable()

    @idempotent
    async def checkpointed(self, step: int, version: int, kept: list[int]) -> None:
        """Records a complete checkpoint after `step` steps. One rank calls it. `kept` are the steps
        of all complete checkpoints that are there now."""
        await self._ensure_recovered()
        self._recorder.checkpoint(step, version, kept)
        await self._recorder.durable()
        await self._messages.record(f"after step {step}, version {version}", "checkpoint")

    @idempotent
    async def position(self) -> str:
        """The ledger's position for a checkpoint; all before it is durable. One rank calls it."""
        await self._ensure_recovered()
        await self._recorder.durable()
        return self._recorder.position

    @idempotent
    async def next_batch(self, rank: int, step: int, version: int) -> dict[str, Any]:
        """The batch of `step`; collective: every rank calls it with the same arguments.

        The call also reports that the batches of earlier steps have been trained on.

        Args:
            step: optimizer steps done so far.
            version: of the weights after these steps, which must have been published.

        Returns, the same kind on every rank:
            {"kind": "batch", ...}: this rank's columns, see `rank_columns`; "metrics" of the whole
                batch; and "mini_batches", for each [micro-batches as lists of the rank's samples,
                tokens in the loss of all ranks, samples of all ranks].
            {"kind": "sync_wanted", "version": v}: an engine came up without weights. Publish the
                current version v to the pool again (only engines that lack it take part) and call
                again with the same step; generation continues meanwhile.

        Raises:
            RewardError: the reward function failed for too many groups.
            DataError: a prompt is too long for the context.
            DeadlineExceeded: a rank is missing.
            RolloutError: ranks disagree, no engine serves for too long, an engine refused a
                request, agent loops failed for too many groups.
        """
        return await self._join(
            rank, CollectiveCall("next_batch", step, self._config.settings.temperature, version)
        )

    @idempotent
    async def evaluate(self, rank: int, step: int, temperature: float = 0.0) -> dict[str, Any]:
        """Generates and scores every held-out prompt; collective like `next_batch`. Returns
        {"kind": "sync_wanted", ...}, or {"kind": "eval", "tokens", "gen_s",
        "completion_len_mean", "truncated_share", "versions", "samples", ...} with
        `evaluation_scores`, [version, generated tokens] of each version, and a few of the worst and
        the best samples."""
        return await self._join(rank, CollectiveCall("evaluate", step, temperature))

    @idempotent
    async def begin_evaluation(self, step: int, temperature: float = 0.0) -> None:
        """Begins what `evaluate` will return, beside batches and under the weights that engines
        have or get meanwhile. One rank calls it. A manager that dies forgets it."""
        await self._ensure_recovered()
        self._called.set()
        self._rendezvous.begin_evaluation(step, temperature)

    async def _join(self, rank: int, wanted: CollectiveCall) -> dict[str, Any]:
        await self._ensure_recovered()
        self._called.set()
        return await self._rendezvous.join(rank, wanted)

    async def _resume(self) -> None:
        """Resumes where the previous incarnation was killed; ranks get its errors when they ask."""
        pool = self._config.dispatch.pool
        try:
            async with self._recovering:
                if not self._is_recovered:
                    await self._context.supervisor.call("pool_states", pool, timeout_s=_POOL_S)
                    await self._recover(None, "")
                    self._flow.resume()
        except UmbraError as error:
            logger.warning("recovery failed and is repeated when the ranks ask: %s", error)
        else:
            self._called.set()

    async def _ensure_recovered(self) -> None:
        async with self._recovering:
            if not self._is_recovered:
                await self._recover(None, "")

    async def _recover(self, restored: Restored | None, position: str) -> dict[str, int]:
        """Restores the ledger's state, in place of the work in progress."""
        if self._config.settings.stop and self._dispatcher.stop_texts is None:
            self._dispatcher.stop_texts = await asyncio.to_thread(self._open_stop_texts)
        self._rendezvous.restore(None)
        self._flow.abandon()
        recovered = Recovered()
        state = await self._recorder.recover(restored, position)
        if state is not None:
            for version, step in state.versions.items():
                self._flow.versions.learn(version, step)
            recovered = recover_groups(
                state, self._admission.training_group, has_teacher=self._teacher is not None
            )
            for sample, records in recovered.records.items():
                self._sessions.remember(sample, records)
            self._rendezvous.restore(state.evaluation)
        if restored is not None and recovered.next_idx is None:
            recovered.next_idx = 0  # a checkpoint of another run, whose data may be other ones
        self._flow.restore(recovered)
        self._is_recovered = True
        groups = len(recovered.open) + len(recovered.ready)
        if groups:
            self._messages.put(
                f"the rollout manager resumes with {groups} groups, {len(recovered.ready)} of them "
                f"scored, and {recovered.num_tokens} tokens"
            )
        newest = 0 if state is None else max(state.versions, default=0)
        return {"groups": groups, "tokens": recovered.num_tokens, "version": newest}

    async def generate(
        self,
        session: int,
        tokens: NDArray[np.int32],
        max_new_tokens: int | None = None,
        lora: str = "",
    ) -> dict[str, Any]:
        if self._rendezvous.failure is not None:
            raise self._rendezvous.failure
        return await self._sessions.generate(session, tokens, max_new_tokens, lora)

    def recall(self, session: int, key: str) -> list[Any]:
        return self._sessions.recall(session, key)

    async def keep(self, session: int, key: str, value: Any) -> None:
        await self._sessions.keep(session, key, value)

    def report_blocked(self, worker: str, incarnation: int, sample_id: str, reason: str) -> None:
        """A rollout worker is about to end because this sample blocks it ("": unknown sample)."""
        self._messages.put(f"{worker}#{incarnation} ends: {reason}")
        if sample_id:
            self._workers.report_blocked(worker, incarnation, sample_id, RolloutError(reason))

    @idempotent
    def stats(self) -> dict[str, Any]:
        return {
            **self._rendezvous.progress(),
            "training": self._flow.progress(),
            "waiting_turns": self._dispatcher.num_waiting,
            "scoring": self._runner.scoring(),
            "at_teacher": self._runner.num_at_teacher(),
            "engines": self._fleet.describe(),
            "version": self._fleet.current_version,
            "counters": dict(self._dispatcher.counters),
            "agents": {
                "replayed_turns": self._sessions.num_replayed_turns,
                "diverged": self._sessions.num_diverged,
            },
        }

    def _open_stop_texts(self) -> StopTexts:
        tokenizer = ModelTokenizer.open(self._config.tokenizer_path)
        return StopTexts(tokenizer.decode_all, self._config.settings.stop, tokenizer.vocab_size)

    def _on_work(self, has_work: bool) -> None:
        self._pool_load.observe(has_work)
        self._rendezvous.on_work(has_work)

    async def _follow_pool(self) -> None:
        try:
            await self._fleet.run(self._rendezvous.on_pool_change)
        except* UmbraError as group:
            self._fail(RolloutError(f"lost track of the engines: {first_leaf(group)}"))

    def _fail(self, error: UmbraError) -> None:
        self._rendezvous.fail(error)  # which is made last
