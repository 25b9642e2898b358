from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.reports.run_metrics import last_steps
from umbra.runtime.session.session import Session
from umbra.runtime.tracing.spans import span
from umbra.trainer.algorithms.base import (
    AdvantageEstimator,
    PolicyLoss,
    load_advantage_estimator,
    load_loss,
)
from umbra.trainer.checkpoint.checkpoint_store import CheckpointStore
from umbra.trainer.checkpoint.run_dir import RunDir, record_settings
from umbra.trainer.checkpoint.trainer_state import BestCheckpoint, TrainerState
from umbra.trainer.config import setting_rules
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.data.train_batch import TrainBatch
from umbra.trainer.learning import (
    add_advantages,
    decode_token,
    export_trained,
    find_resume_point,
    load_models,
    make_train_step,
    warm_up,
)
from umbra.trainer.logprob_check import LogprobCheck
from umbra.trainer.model.host_offload import HostOffload
from umbra.trainer.model.train_model import POLICY, TrainModel
from umbra.trainer.policy_engines import PolicyEngines
from umbra.trainer.reporting.console import ProgressDisplay
from umbra.trainer.reporting.fatal_error_report import FatalErrorReporter
from umbra.trainer.reporting.memory_metrics import GpuMemorySeen, MemoryAccount
from umbra.trainer.reporting.metrics_loggers import read_metrics
from umbra.trainer.reporting.run_reporter import RunReporter, closing_lines, finish
from umbra.trainer.reporting.step_profiler import StepProfiler
from umbra.trainer.services.job_plan import JobPlan, collective_timeout_s
from umbra.trainer.services.memory_needs import planned_settings
from umbra.trainer.services.rollout_start import start_rollouts
from umbra.trainer.services.services import POOL, ServiceStarter, user_folders
from umbra.trainer.step import TrainStep
from umbra.trainer.world.mesh import Mesh, agree_on_signal, any_rank, from_lead
from umbra.trainer.world.signals import StopSignals
from umbra.trainer.world.stop_forecast import StopForecast

T = TypeVar("T")


class TrainingRun:
    """Opens and owns the parts of one rank's run. Every rank has one, and calls each method with
    the others; `train` has their order. `starter`, on rank 0 only, has begun to start the rollout
    workers."""

    # Set by `open`, in this order.
    _estimate: AdvantageEstimator
    _plan: JobPlan
    _gpu_memory: GpuMemorySeen
    _mesh: Mesh
    _memory: MemoryAccount
    _profiler: StepProfiler
    _checkpoints: CheckpointStore
    _identity: dict[str, Any]  # of the data, for `record_settings`
    _models: dict[str, TrainModel]
    _offload: HostOffload
    _engines: PolicyEngines
    _first_step: int  # optimizer steps done before this start
    _saved_step: int  # the step of the newest checkpoint, which may be in progress
    _reporter: RunReporter
    _forecast: StopForecast
    _best: BestCheckpoint | None
    _evaluating: tuple[int, int] | None  # step and version of the evaluation beside training
    _train_step: TrainStep

    def __init__(
        self,
        config: TrainerConfig,
        session: Session,
        environment: TorchrunEnvironment,
        stop: StopSignals,
        display: ProgressDisplay,
        fatal_errors: FatalErrorReporter,
        starter: ServiceStarter | None,
    ) -> None:
        self.config = config
        self.step = 0  # optimizer steps done so far
        self._session = session
        # torchrun's count of restarts may differ between nodes.
        self._environment = replace(environment, incarnation=session.incarnation)
        self._stop = stop
        self._display = display
        self._announce_failure = partial(fatal_errors.announce, session)
        self._starter = starter
        self._run_dir = RunDir(config.run.dir)
        self._row: dict[str, float] = {}  # metrics of the step in progress

    @contextmanager
    def open(self) -> Generator[Self]:
        """Starts and loads the parts; closes them on exit. Raises UmbraError on every rank if one
        is not possible."""
        with ExitStack() as stack:
            folders = user_folders(self.config)
            loss = load_loss(self.config.train.loss, folders)
            self._estimate = load_advantage_estimator(self.config.train.advantage, folders)
            self._plan_job()
            self._join_ranks(stack)
            self._by_starter(ServiceStarter.wait_for_workers)
            resumed_from = self._begin_run_dir()
            self._start_rollouts()
            self._load_models()
            state = self._resume(resumed_from)
            self._warm_up()
            self._by_starter(ServiceStarter.wait)
            self._engines.begin(state, resumed_from)
            self._open_reports(stack)
            self._make_train_step(loss)
            self._stop.defer(self._session.pass_on_signal, self._forecast)
            yield self

    def _plan_job(self) -> None:
        """Starts the engines, too."""
        self._plan = plan = JobPlan.make(
            self.config, self._session, self._environment.local_world_size
        )
        self.config = config = plan.config
        if plan.memory.expected_nbytes:
            self._display.note(f"by the memory plan: {planned_settings(config)}")
        if self._starter is None:
            return
        warnings = [f"warning: {each}" for each in setting_rules.warnings(config)]
        table = plan.placement.table(plan.memory.columns())
        for line in (*warnings, *table, *plan.memory.notes):
            self._display.note(line)
        self._starter.start_engines(config, plan.placement, plan.device_type)
        if address := config.run.metrics_address:
            url = self._session.lead_call("serve_metrics", address)
            self._display.note(f"metrics for Prometheus: {url}")

    def _join_ranks(self, stack: ExitStack) -> None:
        plan, limit_s = self._plan, collective_timeout_s(self.config)
        planned = plan.memory.gpus if self._starter else ()
        gpu_memory = GpuMemorySeen.open(plan.placement.nodes[0].gpus, planned)
        self._gpu_memory = stack.enter_context(gpu_memory)
        with self._display.activity("connecting the ranks"):
            mesh = Mesh.join(self._environment, self.config.train.device, limit_s)
            self._mesh = stack.enter_context(mesh)
        stack.push(self._announce_failure)
        self._memory = MemoryAccount(self._mesh.device)
        self._profiler = StepProfiler(self.config.run, self._mesh.rank)

    def _by_starter(self, act: Callable[[ServiceStarter], T]) -> T:
        """The result on rank 0, which has the starter, on every rank."""

        def start() -> T:
            assert self._starter is not None
            return act(self._starter)

        return from_lead(self._mesh, start)

    def _begin_run_dir(self) -> Path | None:
        run, train = self.config.run, self.config.train
        folder = self._run_dir.checkpoints
        self._checkpoints = CheckpointStore(folder, self._mesh, train.keep_checkpoints)
        incarnation = self._environment.incarnation
        return find_resume_point(run, incarnation, self._checkpoints, self._mesh, self._display)

    def _start_rollouts(self) -> None:
        config, mesh = self.config, self._mesh
        num_prompts, self._identity = self._by_starter(
            lambda starter: start_rollouts(
                config, starter, self._display, mesh.world_size, mesh.device.type
            )
        )
        self.config = config.with_steps(num_prompts)

    def _load_models(self) -> None:
        config, mesh = self.config, self._mesh
        self._models = load_models(config, mesh, self._display)
        self._models[POLICY].keeps_logits = self._plan.memory.logits_nbytes > 0
        self._offload = HostOffload(config.train.offload, self._models.values(), mesh.device)
        self._engines = PolicyEngines(
            config,
            self._session,
            mesh,
            self._models[POLICY],
            self._offload,
            self._plan.memory,
            self._gpu_memory,
            self._stop,
            self._display.note,
        )

    def _resume(self, resumed_from: Path | None) -> TrainerState:
        state = TrainerState(step=0, version=0, world_size=self._mesh.world_size, seed=0)
        if resumed_from is not None:
            with self._display.activity("loading the checkpoint"):
                state = self._checkpoints.load(resumed_from, self._models)
        # Only now: a checkpoint that these settings do not fit belongs to those before.
        from_lead(self._mesh, lambda: record_settings(self.config, self._identity))
        self.step = self._first_step = self._saved_step = state.step
        self._offload.release_cache()  # loading filled it, and engines are starting
        return state

    def _warm_up(self) -> None:
        """Compiles the training step while engines start."""
        if self._engines.may_warm_up(self.step):
            compiling = self._display.activity("compiling the training step")
            with compiling, self._engines.training_step(is_warm_up=True):
                warm_up(self.config, self._mesh, self._models, self.step)
            self._offload.release_cache()  # engines are starting

    def _open_reports(self, stack: ExitStack) -> None:
        train, is_lead = self.config.train, self._mesh.is_lead
        reporter = RunReporter.open(self.config, self._display, self.step, is_lead=is_lead)
        self._reporter = stack.enter_context(reporter)
        if is_lead:
            stack.push(self._announce_failure)  # before closing loggers, which may wait for servers
        self._forecast = StopForecast(self.step, train.shutdown_grace_s, self._display.note)
        self._best = self._evaluating = None
        if train.keep_best_by is not None and is_lead:
            rows = read_metrics(self._run_dir.metrics)
            self._best = BestCheckpoint(
                self._run_dir.checkpoints, train.keep_best_by, rows, self.step
            )

    def _make_train_step(self, loss: PolicyLoss) -> None:
        model, train = self.config.model, self.config.train
        check = LogprobCheck(
            model.compute_dtype,
            train.max_logprob_difference,
            self._engines.versions,
            partial(decode_token, self.config.run.dir),
            self._display.note,
            from_lead(self._mesh, lambda: last_steps(self._run_dir.path)),
        )
        self._train_step = make_train_step(
            self.config, self._mesh, self._models, loss, self._display.note, check
        )

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.config.model.compute_dtype)

    def publish(self) -> bool:
        """Gives the weights to the engines; False if the ranks agreed to stop instead."""
        with self._memory.phase("sync"), self._display.activity("syncing weights"):
            row = self._engines.publish(self.step)
        if row is None:
            return False
        self._row = row
        return True

    def evaluate_if_due(self) -> None:
        train = self.config.train
        is_first = self.step == self._first_step and train.eval_at_start
        is_due = is_first or (self.step > 0 and self._is_due(train.eval_every))
        self._end_evaluation(waits=is_due)
        if is_due and train.eval_beside and self.config.data.eval is not None:
            self._engines.begin_evaluation(self.step)
            self._evaluating = self.step, self._engines.versions.current
        elif is_due:
            self._evaluate(self.step)

    def _end_evaluation(self, *, waits: bool) -> None:
        """Reports the evaluation beside training, if there is one, as soon as it is done."""
        begun, rollouts = self._evaluating, self._engines.rollouts
        if begun and (waits or from_lead(self._mesh, rollouts.is_evaluated)):
            self._evaluating = None
            self._evaluate(*begun)

    def next_batch(self) -> TrainBatch | None:
        """This rank's part of the next batch; None if the ranks agreed to stop instead."""
        rollouts = self._engines.rollouts
        with (
            self._memory.phase("generation"),
            span("wait for the batch") as waiting,
            self._display.activity(
                f"generating for step {self.step + 1}", unit="prompts", ask=rollouts.batch_progress
            ),
        ):
            answer = self._engines.next_batch(self.step)
        if answer is None:
            return None
        self._gpu_memory.look("generation")
        self._row["time/rollout_s"] = waiting.seconds
        batch = TrainBatch.from_answer(answer)
        self._row |= batch.row
        return batch

    @contextmanager
    def training_owns_gpus(self) -> Generator[None]:
        """Engines that share GPUs with ranks pause from here to the next `publish`."""
        with self._forecast.training():
            with span("put engines to sleep") as sleeping:
                self._engines.sleep()
            self._row["time/sleep_s"] = sleeping.seconds
            with self._engines.training_step():
                yield

    def add_advantages(self, batch: TrainBatch) -> None:
        add_advantages(self.config, self._estimate, batch)

    def update(self, batch: TrainBatch) -> None:
        """Updates the weights with a batch."""
        activity = self._display.activity(f"training step {self.step + 1}")
        profiled = self._profiler.step(self.step + 1)
        with self._memory.phase("train"), activity, profiled as profile:
            self._row |= self._train_step.run(batch, self.step)
        self._row |= profile
        self._gpu_memory.look("train")  # torch's cache still holds the peak

    def finish_step(self, step_s: float) -> None:
        """Reports the step, and begins to save it if a checkpoint is due."""
        self.step += 1
        row = self._row | self._memory.take() | self._gpu_memory.metrics()
        if offload_s := self._offload.take_seconds():
            row["time/offload_s"] = offload_s
        row["time/step_s"] = step_s
        row["time/rank_idle_share"] = row["time/rollout_s"] / step_s
        self._reporter.step_done(self.step, row)
        self._reporter.look_at_rollouts(self.config, self.step, row)
        train = self.config.train
        is_evaluated = train.keep_best_by is not None and self._is_due(train.eval_every)
        if is_evaluated or self._is_due(train.checkpoint_every):
            self.save(in_background=True)

    def should_stop(self) -> bool:
        """By a signal, or a checkpoint that could not be written: `save` then raises."""
        return any_rank(self._stop.requested or self._checkpoints.has_failed)

    def save(self, *, in_background: bool = False) -> None:
        """Checkpoints the state after the last step, unless that was done."""
        if self.step != self._saved_step:
            self._begin_save(in_background=in_background)
        if not in_background:
            self._checkpoints.finish()

    def _begin_save(self, *, in_background: bool) -> None:
        self._engines.sleep_if_awake()
        rollouts, is_lead = self._engines.rollouts, self._mesh.is_lead
        foretell = self._forecast.saving()
        state = TrainerState(
            step=self.step,
            version=self._engines.versions.current,
            world_size=self._mesh.world_size,
            seed=self.config.train.seed,
            ledger=rollouts.position() if is_lead else "",
        )

        def announce() -> None:
            foretell()
            if is_lead:
                rollouts.checkpointed(state.step, state.version, self._checkpoints.steps())

        with span("checkpoint", step=self.step), self._display.activity("saving a checkpoint"):
            self._checkpoints.save(state, self._models, announce, in_background=in_background)
        self._saved_step = self.step

    def evaluate_at_end(self) -> None:
        """Evaluates the last weights."""
        self.save()  # first, because the evaluation may choose it as the best
        if self.publish():  # before any wait, in which engines that come up get these weights
            self._end_evaluation(waits=True)
            self._evaluate(self.step, is_last=True)
        self._engines.sleep_if_awake()  # for the export

    def _evaluate(self, step: int, version: int | None = None, *, is_last: bool = False) -> None:
        """Scores the held-out prompts; a signal ends it without a result. `version` is of the
        weights after `step` steps, if engines may have had later ones meanwhile."""
        if self.config.data.eval is None:
            return
        evaluating = self._display.activity(
            f"evaluating after step {step}",
            unit="completions",
            ask=self._engines.rollouts.evaluation_progress,
        )
        with span("evaluate", step=step), evaluating:
            result = self._engines.evaluate(step)
        if result is None:
            self._note_lost(step)
            return
        row = self._reporter.evaluated(step, result, version, is_last=is_last)
        if self.config.train.keep_best_by is not None:
            self._checkpoints.finish()  # the evaluation's may be in progress
        if self._best and self._best.evaluated(self._checkpoints.path(self.step), row):
            self._display.note(f"the best checkpoint is that of step {self.step}")

    def _note_lost(self, step: int) -> None:
        is_last = step == self.config.train.total_steps
        later = "repeats it" if is_last else "evaluates by train.eval_at_start"
        self._display.note(
            f"the evaluation after step {step} was not finished, and is lost: a resume {later}"
        )

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def leave_results(self) -> None:
        """Writes export, summary, plot and report."""
        self._stop.disarm()
        if self._evaluating is not None:
            self._note_lost(self._evaluating[0])
        if seen_nbytes := self._gpu_memory.seen_nbytes:
            self._display.note("GPU memory, planned and (seen in the last step):")
            for line in self._plan.placement.table(self._plan.memory.columns(seen_nbytes)):
                self._display.note(line)
        run_dir = RunDir(self._checkpoints.folder.parent)  # it may have been moved
        config = replace(self.config, run=replace(self.config.run, dir=run_dir.path))
        stopped_by = agree_on_signal(self._stop.received)
        if config.train.export and not stopped_by:
            export_trained(config, self._models, self._mesh, self._display)
        from_lead(self._mesh, lambda: self._report(config, stopped_by))

    def _report(self, config: TrainerConfig, stopped_by: str) -> None:
        pools = [self._session.pool(name) for name in (POOL, *config.pools)]
        states = [state for pool in pools for state in pool.states()]
        summary = finish(
            config,
            self._reporter,
            steps=self.step,
            engine_restarts=sum(int(state["num_restarts"]) for state in states),
            stopped_by=stopped_by,
        )
        for line in closing_lines(summary):
            self._display.note(line)
