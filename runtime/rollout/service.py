"""The rollout manager: an actor that turns prompts into scored, balanced batches.

    ranks --next_batch--> Rendezvous          Admission -> Harvest -> Dispatcher -> engines
                              ^                               |
                              +---- batch | sync_wanted <-----+--> WorkerPool -> rewards, agents

One loop, no locks: the parts call each other, and whatever may have changed the answer to the
waiting ranks ends in `_answer()`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.actor import actor_context
from umbra.runtime.errors import DeadlineExceeded, RolloutError, UmbraError
from umbra.runtime.rollout.admission import Admission
from umbra.runtime.rollout.advantages import group_advantages
from umbra.runtime.rollout.alarm import Alarm
from umbra.runtime.rollout.batch import batch_metrics, rank_columns
from umbra.runtime.rollout.batching import plan_batch
from umbra.runtime.rollout.config import RolloutConfig
from umbra.runtime.rollout.dispatch import Dispatcher
from umbra.runtime.rollout.error_groups import first_leaf
from umbra.runtime.rollout.fleet import Fleet
from umbra.runtime.rollout.harvest import Harvest
from umbra.runtime.rollout.rendezvous import Rendezvous, Round
from umbra.runtime.rollout.router import EngineId, Router
from umbra.runtime.rollout.sessions import AgentSessions
from umbra.runtime.rollout.sync_asks import SyncAsks
from umbra.runtime.rollout.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

_CATCH_UP_TIMEOUT_S: Final = 10.0
"""For the supervisor to say which engines lack weights; it answers from memory."""


class RolloutManager:
    """Owns all groups of its node, from prompt to delivered batch. An actor.

    An error that makes a batch impossible is final: every rank gets it, now and in later calls.

    Args:
        config: `RolloutConfig` as a dict.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = RolloutConfig.from_wire(config)
        self._admission = Admission(self._config)
        context = actor_context()
        self._context = context
        router = Router(self._config.max_inflight_per_engine)
        self._dispatcher = Dispatcher(router, self._fail)
        self._sessions = AgentSessions(self._dispatcher, self._config.stop_token_ids)
        self._workers = WorkerPool(
            self._config.rollout_actors,
            context,
            concurrency={
                "score": self._config.score_concurrency,
                **({"run_agent": self._config.agent_concurrency} if self._config.agent else {}),
            },
            max_deaths=self._config.max_worker_deaths,
            on_failure=self._fail,
        )
        self._fleet = Fleet(
            self._config, context, self._dispatcher, self._on_pool_change, self._note
        )
        self._asks = SyncAsks()
        self._ranks = Rendezvous(self._config.world_size, self._config.rank_timeout_s)
        self._starving = Alarm(self._config.engine_timeout_s, self._on_starved)
        self._round: Round | None = None
        self._harvest: Harvest | None = None
        self._failure: UmbraError | None = None
        self._wanted = asyncio.Event()
        self._lacking = asyncio.Event()
        self._num_answers = 0
        self._notes: asyncio.Queue[str] = asyncio.Queue()
        self._num_delivered = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._starving.watch(False)
        self._admission.close()

    async def run(self) -> None:
        """Owns every task of the manager; lives until the actor is stopped."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send_notes())
            await self._wanted.wait()  # the pool and the workers may be made after the manager
            tasks.create_task(self._workers.run())
            tasks.create_task(self._follow_pool())
            tasks.create_task(self._ask_for_syncs())

    # -- calls of the ranks --------------------------------------------------------------

    async def next_batch(self, rank: int, step: int) -> dict[str, Any]:
        """The batch of `step`; collective: every rank calls it with the same step.

        Returns, the same kind on every rank:
            {"kind": "batch", ...}: this rank's columns, see `batch.rank_columns`, with "metrics",
                "loss_tokens_global" and "num_samples_global" of the whole batch.
            {"kind": "sync_wanted", "version": v}: an engine came up without weights. Publish the
                current version v to the pool again (only engines that lack it take part) and
                call again with the same step; generation goes on meanwhile.

        Raises:
            RewardError: see `RewardFunction`.
            DataError: a prompt too long for the context.
            RolloutError: a rank is missing, ranks disagree, no engine serves for too long, an
                engine refused a request, an agent loop failed.
        """
        return await self._join(rank, Round("next_batch", step, self._config.temperature))

    async def evaluate(self, rank: int, step: int, temperature: float = 0.0) -> dict[str, Any]:
        """Generates and scores every held-out prompt once; collective like `next_batch`.

        Returns:
            {"kind": "eval", "mean_reward", "accuracy", "num_prompts", "tokens", "gen_s",
            "completion_len_mean", "truncated_share"} or {"kind": "sync_wanted", ...}. Accuracy
            is the share of rewards of at least `accuracy_threshold`.
        """
        return await self._join(rank, Round("evaluate", step, temperature))

    async def _join(self, rank: int, wanted: Round) -> dict[str, Any]:
        if self._failure is not None:
            raise self._failure
        slot = self._ranks.arrive(rank, wanted)
        try:
            if self._round != wanted or self._harvest is None:
                self._begin(wanted)
        except UmbraError as error:
            self._fail(error)
        self._answer()
        return await self._ranks.wait(rank, slot)

    def _begin(self, wanted: Round) -> None:
        """Starts a round's work; what an earlier round left unfinished is dropped."""
        if self._harvest is not None:
            logger.warning("%s is dropped for %s", self._round, wanted)
            self._harvest.abandon()
        is_eval = wanted.call == "evaluate"
        self._round = wanted
        self._harvest = Harvest(
            self._admission.evaluation_groups()
            if is_eval
            else self._admission.training_groups(wanted.step),
            name=self._context.name,
            config=self._config,
            temperature=wanted.temperature,
            dispatcher=self._dispatcher,
            sessions=self._sessions,
            workers=self._workers,
            on_done=self._answer,
        )
        self._wanted.set()
        self._harvest.begin()

    # -- calls of agent loops, and of anyone ---------------------------------------------

    async def generate(
        self, session: int, tokens: NDArray[np.int32], max_new_tokens: int | None = None
    ) -> dict[str, Any]:
        """One generation of an agent loop; see `AgentSessions.generate`."""
        if self._failure is not None:
            raise self._failure
        return await self._sessions.generate(session, tokens, max_new_tokens)

    def stats(self) -> dict[str, Any]:
        """What is in progress, for progress lines."""
        return {
            "round": str(self._round) if self._harvest else None,
            "progress": self._harvest.progress() if self._harvest else None,
            "waiting_turns": self._dispatcher.num_waiting,
            "engines": self._fleet.describe(),
            "version": self._fleet.current_version,
            "counters": dict(self._dispatcher.counters),
            "batches_delivered": self._num_delivered,
        }

    # -- what happens meanwhile ----------------------------------------------------------

    async def _follow_pool(self) -> None:
        try:
            await self._fleet.run()
        except* UmbraError as group:
            self._fail(RolloutError(f"lost sight of the engines: {first_leaf(group)}"))

    def _on_pool_change(self) -> None:
        self._asks.observe(self._fleet.pending)
        self._answer()

    def _answer(self) -> None:
        """Answers the ranks, if all are here and there is something to say."""
        harvest = self._harvest
        working = harvest is not None and not harvest.is_done
        self._starving.watch(working and not self._fleet.is_serving)
        if harvest is None or not self._ranks.is_full:
            return
        if harvest.is_done:
            self._deliver(harvest)
            return
        if self._fleet.pending:
            self._lacking.set()

    async def _ask_for_syncs(self) -> None:
        """Asks the waiting ranks to bring the current version to engines that lack it.

        What this manager has heard of the pool may be older than what the ranks have done since
        (a sync that has ended passes through PENDING_WEIGHTS), so the supervisor decides.
        """
        while True:
            await self._lacking.wait()
            self._lacking.clear()
            waiting = (self._round, self._num_answers)
            try:
                lack = await self._context.supervisor.call(
                    "catch_up", self._config.pool, timeout_s=_CATCH_UP_TIMEOUT_S
                )
            except DeadlineExceeded as error:
                logger.warning("the supervisor is slow; asking again: %s", error)
                self._lacking.set()
                continue
            harvest = self._harvest
            unchanged = waiting == (self._round, self._num_answers) and self._ranks.is_full
            if not unchanged or harvest is None or harvest.is_done:
                continue
            engines = self._asks.wanted(EngineId(name, life) for name, life in lack["engines"])
            if engines:
                names = ", ".join(str(engine) for engine in engines)
                logger.info("asking the ranks to bring version %d to %s", lack["version"], names)
                answer = {"kind": "sync_wanted", "version": lack["version"]}
                self._resolve([answer] * self._config.world_size)

    def _resolve(self, answers: list[dict[str, Any]]) -> None:
        self._num_answers += 1
        self._ranks.resolve(answers)

    def _deliver(self, harvest: Harvest) -> None:
        assert self._round is not None
        is_eval = self._round.call == "evaluate"
        answers = self._evaluation(harvest) if is_eval else self._batches(harvest)
        self._harvest = None
        self._num_delivered += 1
        self._resolve(answers)

    def _batches(self, harvest: Harvest) -> list[dict[str, Any]]:
        config = self._config
        samples = [sample for group in harvest.groups for sample in group.trajectories]
        advantages = np.concatenate(
            [group_advantages(group.rewards, config.advantage) for group in harvest.groups]
        )
        plans = plan_batch(
            [group.shape() for group in harvest.groups],
            config.world_size,
            num_micro_batches=config.num_micro_batches,
            max_tokens_per_micro_batch=config.max_tokens_per_micro_batch,
        )
        shared = {
            "kind": "batch",
            "metrics": batch_metrics(harvest.groups, harvest.gen_s),
            "loss_tokens_global": sum(sample.num_generated for sample in samples),
            "num_samples_global": len(samples),
        }
        return [{**shared, **rank_columns(harvest.groups, advantages, plan)} for plan in plans]

    def _evaluation(self, harvest: Harvest) -> list[dict[str, Any]]:
        metrics = batch_metrics(harvest.groups, harvest.gen_s)
        rewards = np.concatenate([group.rewards for group in harvest.groups])
        answer = {
            "kind": "eval",
            "mean_reward": metrics["reward_mean"],
            "accuracy": float(np.mean(rewards >= self._config.accuracy_threshold)),
            "num_prompts": len(rewards),
            "tokens": metrics["tokens"],
            "gen_s": metrics["gen_s"],
            "completion_len_mean": metrics["completion_len_mean"],
            "truncated_share": metrics["truncated_share"],
        }
        return [answer] * self._config.world_size

    def _on_starved(self) -> None:
        self._fail(
            RolloutError(
                f"no engine of pool {self._config.pool!r} has served for "
                f"{self._config.engine_timeout_s:.3g} s while {self._round} waits "
                f"({self._fleet.describe()}): publish weights and wake the pool, or see the "
                "engines' logs"
            )
        )

    def _fail(self, error: UmbraError) -> None:
        """Ends the job's rollouts: the first error counts, and every rank gets it."""
        if self._failure is not None:
            return
        logger.error("rollouts failed: %s", error)
        self._failure = error
        self._starving.watch(False)
        if self._harvest is not None:
            self._harvest.abandon()
        self._ranks.fail(error)

    def _note(self, text: str) -> None:
        logger.info("%s", text)
        self._notes.put_nowait(text)  # one a lost engine: bounded by the restart policy

    async def _send_notes(self) -> None:
        """Puts notes where the person who runs the job sees them."""
        while True:
            text = await self._notes.get()
            try:
                await self._context.supervisor.call("note", text, timeout_s=5.0)
            except UmbraError as error:
                logger.warning("the supervisor did not take a note: %s", error)
