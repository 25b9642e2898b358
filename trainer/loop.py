"""The training loop of one rank. All ranks run it in step.

    publish(v) -> [evaluate] -> next_batch -> sleep the pool -> train -> v + 1 -> [checkpoint]

In a hybrid pool, engines and trainer use the GPUs in turn: engines sleep while the trainer
computes, and get the new weights when they wake. With `train.offload`, a rank's memory moves to the
host as soon as the engines have read its weights, and comes back when the engines sleep. In a
standalone pool, engines generate all the time, as far ahead as `rollout.max_staleness` allows, and
are updated meanwhile.

The ranks agree on stopping where they synchronise anyway: before training on a batch, and after a
step. A signal to one of them ends the waits of all (`umbra.trainer.world.signals`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.rpc.sync_handle import Pool
from umbra.runtime.session.rollouts import Rollouts
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.tracing.spans import span
from umbra.runtime.weights.sync_messages import SyncReport
from umbra.trainer.algorithms.base import AdvantageEstimator
from umbra.trainer.checkpoint.best_checkpoint import BestCheckpoint
from umbra.trainer.checkpoint.checkpoint_store import CheckpointStore
from umbra.trainer.checkpoint.run_dir import VersionCounter
from umbra.trainer.checkpoint.trainer_state import TrainerState
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.model.host_offload import HostOffload
from umbra.trainer.model.micro_batches import RankBatch
from umbra.trainer.model.optimizer import PolicyOptimizer
from umbra.trainer.model.policy import Policy
from umbra.trainer.reporting.console import ProgressDisplay
from umbra.trainer.reporting.memory_metrics import GpuMemorySeen, MemoryAccount
from umbra.trainer.reporting.run_reporter import RunReporter
from umbra.trainer.services.services import POOL
from umbra.trainer.step import TrainStep
from umbra.trainer.world.signals import StopRequested, StopSignals
from umbra.trainer.world.stop_forecast import StopForecast
from umbra.trainer.world.world import World, any_rank

T = TypeVar("T")


@dataclass(kw_only=True)
class TrainingLoop:
    """Owns nothing: its caller creates and closes every part."""

    config: TrainerConfig
    world: World
    policy: Policy
    optimizer: PolicyOptimizer
    estimate: AdvantageEstimator  # the function of `train.advantage`
    train_step: TrainStep
    rollouts: Rollouts
    pool: Pool
    publisher: WeightPublisher
    offload: HostOffload
    checkpoints: CheckpointStore
    best: BestCheckpoint | None  # on rank 0, with `train.keep_best_by`
    versions: VersionCounter
    reporter: RunReporter
    display: ProgressDisplay
    gpu_memory: GpuMemorySeen
    stop: StopSignals
    forecast: StopForecast
    step: int  # optimizer steps done so far

    def __post_init__(self) -> None:
        self._train = self.config.train
        self._memory = MemoryAccount(self.world.device)
        self._first_step = self.step
        self._saved_step = self.step

    def run(self) -> None:
        """Trains until `train.steps`, or until the ranks agree to stop; saves a checkpoint."""
        train = self._train
        while self.step < train.total_steps:
            row = self._do_step()
            if row is None:
                break
            self.reporter.step_done(self.step, row)
            is_evaluated = train.keep_best_by is not None and self._is_due(train.eval_every)
            if is_evaluated or self._is_due(train.checkpoint_every):
                self.save()
            if any_rank(self.stop.requested):
                break
        else:
            self.save()  # before the last evaluation, which may choose it as the best
            if self._publish() is not None:
                self._evaluate(is_last=True)
            self._take_memory_back()  # for the export
        self.save()

    def _do_step(self) -> dict[str, float] | None:
        """Returns metrics, or None if the ranks agreed to stop instead."""
        with span("step", step=self.step + 1) as step:
            row = self._take_step()
        if row is not None:
            row["time/step_s"] = step.seconds
            row["time/rank_idle_share"] = row["time/rollout_s"] / step.seconds
        return row

    def _take_step(self) -> dict[str, float] | None:
        with self._memory.phase("sync"):
            row = self._publish()
        if row is None:
            return None
        is_first = self.step == self._first_step and self._train.eval_at_start
        if is_first or (self.step and self._is_due(self._train.eval_every)):
            self._evaluate()
        with (
            self._memory.phase("generation"),
            span("wait for the batch") as waiting,
            self.display.activity(
                f"generating for step {self.step + 1}",
                unit="prompts",
                ask=self.rollouts.batch_progress,
            ),
        ):
            columns = self._next_batch()
        if any_rank(columns is None) or columns is None:
            return None
        self.gpu_memory.look("generation")
        with self.forecast.phase("step"):
            row |= self._train_on(columns)
        row["time/rollout_s"] = waiting.seconds
        row |= self._memory.take() | self.gpu_memory.metrics()
        self.step += 1
        if offload_s := self.offload.take_seconds():
            row["time/offload_s"] = offload_s
        return row

    def _train_on(self, columns: Mapping[str, Any]) -> dict[str, float]:
        """Updates the weights with a batch; returns its metrics."""
        with span("put engines to sleep") as sleeping:
            self._sleep_engines()
            self.offload.bring_back()
        batch = RankBatch.from_columns(columns, self.estimate)
        row = {
            name if "/" in name else f"rollout/{name}": float(value)
            for name, value in batch.metrics.items()
        }
        row["time/sleep_s"] = sleeping.seconds
        with self._memory.phase("train"), self.display.activity(f"training step {self.step + 1}"):
            row |= self.train_step.run(batch, self.step)
        self.gpu_memory.look("train")  # torch's cache still holds the peak
        return row

    def _publish(self) -> dict[str, float] | None:
        """Publishes the weights to the engines under a new version; returns its metrics.

        None if a signal to any rank ended it: nothing would be generated with these weights.
        """
        version = self.versions.next(self.step)
        with span("sync", version=version) as sync, self.display.activity("syncing weights"):
            if self.world.is_lead:
                self.rollouts.announce(version, self.step)
            report = self._wait(lambda: self._sync(version))
        if any_rank(report is None) or report is None:
            return None
        return {
            "sync/version": float(version),
            "sync/prepare_s": report.prepare_s,
            "sync/transfer_s": report.transfer_s,
            "sync/verify_s": report.verify_s,
            "sync/resume_s": report.resume_s,
            "sync/network_mib": report.network_nbytes / (1 << 20),
            "sync/failed_engines": float(len(report.failed)),
            "time/sync_s": sync.seconds,
        }

    def _sync(self, version: int) -> SyncReport:
        if self.config.pool.mode == "hybrid":
            # Engines wake once every rank has joined the sync, when all have released their cache.
            self.offload.release_cache()
        return self.publisher.publish(POOL, version, self.config.pool.sync_timeout_s)

    def _serve_sync(self, version: int) -> None:
        """Publishes the current version again, to an engine that came up while this rank waits."""
        with span("sync again", version=version):
            self._sync(version)

    def _next_batch(self) -> Mapping[str, Any] | None:
        """This rank's columns; None if a signal ended the wait."""
        return self._wait(
            lambda: self.rollouts.next_batch(
                self.step,
                self.versions.current,
                self._serve_sync,
                self.config.rollout.timeout_s,
            )
        )

    def _wait(self, ask: Callable[[], T]) -> T | None:
        """The result of `ask`; None if a signal ended the wait."""
        try:
            # A signal that reaches one rank during a sync fails the sync on all ranks.
            with self.stop.interruptible(WeightSyncError):
                return ask()
        except StopRequested:
            return None

    def _sleep_engines(self) -> None:
        if self.config.pool.mode != "hybrid":
            return
        if self.world.is_lead:
            self.pool.sleep(2)
        any_rank(False)  # a barrier: no rank takes memory before the engines have released theirs

    def _take_memory_back(self) -> None:
        if any_rank(self.offload.is_away):  # a signal may have reached only some ranks
            self._sleep_engines()
            self.offload.bring_back()

    def _evaluate(self, *, is_last: bool = False) -> None:
        """Scores the held-out prompts; a signal ends it without a result."""
        if self.config.data.eval is None:
            return
        temperature, limit_s = self.config.eval.temperature, self.config.rollout.timeout_s
        evaluating = self.display.activity(
            f"evaluating after step {self.step}",
            unit="completions",
            ask=self.rollouts.evaluation_progress,
        )
        with span("evaluate", step=self.step), evaluating:
            result = self._wait(
                lambda: self.rollouts.evaluate(self.step, temperature, self._serve_sync, limit_s)
            )
        if result is not None:
            row = self.reporter.evaluated(self.step, result, is_last=is_last)
            if self.best is not None and self.best.evaluated(self.checkpoints.path(self.step), row):
                self.display.note(f"the best checkpoint is that of step {self.step}")

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def save(self) -> None:
        """Checkpoints the state after the last step, unless that was done. Collective."""
        if self.step == self._saved_step:
            return
        self._take_memory_back()
        is_lead = self.world.is_lead
        state = TrainerState(
            step=self.step,
            version=self.versions.current,
            world_size=self.world.world_size,
            seed=self._train.seed,
            ledger=self.rollouts.position() if is_lead else "",
        )
        with (
            span("checkpoint", step=self.step),
            self.forecast.phase("checkpoint"),
            self.display.activity("saving a checkpoint"),
        ):
            self.checkpoints.save(state, self.policy.parameters, self.optimizer.adamw)
            if is_lead:
                self.rollouts.checkpointed(state.step, state.version, self.checkpoints.steps())
        self._saved_step = self.step
