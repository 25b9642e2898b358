from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.rollout.dispatch.trajectory import GroupShape
from umbra.runtime.rollout.manager.admission import PromptOrder
from umbra.runtime.rollout.manager.batch_answers import plan_batch
from umbra.runtime.rollout.rollout_config import BatchLayout
from umbra.runtime.tracing.spans import span
from umbra.trainer.algorithms.base import LossMetric, LossOutput
from umbra.trainer.checkpoint.checkpoint_store import CheckpointStore
from umbra.trainer.checkpoint.run_dir import (
    RunDir,
    VersionCounter,
    newest_version,
    record_settings,
)
from umbra.trainer.checkpoint.trainer_state import TrainerState
from umbra.trainer.config.sft_config import SftConfig
from umbra.trainer.data.train_batch import MiniBatch, RewardGroups, TrainBatch
from umbra.trainer.learning import export_trained, find_resume_point, load_models
from umbra.trainer.model.micro_batches import MicroBatch, MicroBatchBuilder
from umbra.trainer.model.token_scoring import EntropyUse
from umbra.trainer.model.train_model import POLICY, TokenScores, TrainModel
from umbra.trainer.reporting.console import ProgressDisplay
from umbra.trainer.reporting.memory_metrics import MemoryAccount
from umbra.trainer.reporting.run_reporter import RunReporter, closing_lines, finish
from umbra.trainer.reporting.step_profiler import StepProfiler
from umbra.trainer.services.chosen_settings import compile_obstacle
from umbra.trainer.services.services import batch_layout
from umbra.trainer.sft.row_preparation import RowFiles, prepare_rows
from umbra.trainer.step import TrainStep
from umbra.trainer.world.mesh import Mesh, agree_on_signal, any_rank, from_lead, sum_over_ranks
from umbra.trainer.world.signals import StopSignals
from umbra.trainer.world.stop_forecast import StopForecast

_COLLECTIVE_LIMIT_S: Final = 1800.0
"""Timeout of a collective. Less is too short for ranks that wait while rank 0 tokenizes much data;
with more, ranks wait long for one whose network drops packets."""

_NO_GROUPS: Final = RewardGroups(
    np.zeros((1, 0), np.float32), np.zeros(1, np.int32), np.zeros(0, np.int32)
)


class CrossEntropy:
    """The mean of -logprob over the learned tokens of a batch: an `Objective`."""

    entropy_use: EntropyUse = "none"

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
        loss = -(micro_batch.weights * scores.logprobs).sum()
        return LossOutput(loss, {"loss": LossMetric(loss, "sum")})


class SftRun:
    """Opens and owns the parts of one rank's run. Every rank has one, and calls each method with
    the others. Nothing but the ranks runs: no engines, no supervisor."""

    # Set by `open`, in this order.
    _mesh: Mesh
    _memory: MemoryAccount
    _profiler: StepProfiler
    _checkpoints: CheckpointStore
    _identity: dict[str, object]  # of the data, for `record_settings`
    _train_batches: SftBatches
    _eval_batches: SftBatches | None
    _order: PromptOrder
    _models: dict[str, TrainModel]
    _first_step: int  # optimizer steps done before this start
    _saved_step: int  # the step of the newest checkpoint, which may be in progress
    _versions: VersionCounter  # of checkpoints: steps are repeated after a rollback
    _reporter: RunReporter
    _forecast: StopForecast
    _builder: MicroBatchBuilder
    _train_step: TrainStep

    def __init__(
        self,
        config: SftConfig,
        environment: TorchrunEnvironment,
        stop: StopSignals,
        display: ProgressDisplay,
    ) -> None:
        self.config = config
        self.step = 0  # optimizer steps done so far
        self._environment = environment
        self._stop = stop
        self._display = display
        self._run_dir = RunDir(config.run.dir)

    @contextmanager
    def open(self) -> Generator[Self]:
        """Loads the parts; closes them on exit. Raises UmbraError on every rank if one is not
        possible."""
        with ExitStack() as stack:
            self._join_ranks(stack)
            run, train = self.config.run, self.config.train
            folder = self._run_dir.checkpoints
            self._checkpoints = CheckpointStore(folder, self._mesh, train.keep_checkpoints)
            resumed_from = find_resume_point(
                run, self._environment.incarnation, self._checkpoints, self._mesh, self._display
            )
            self._prepare_rows(resumed_from)
            self._models = load_models(self.config.as_trainer_config(), self._mesh, self._display)
            self._resume(resumed_from)
            self._open_reports(stack)
            self._make_train_step()
            self._stop.defer(forecast=self._forecast)
            yield self

    def _join_ranks(self, stack: ExitStack) -> None:
        environment = self._environment
        if environment.has_own_store:  # it is new in each round, in which counts may differ
            environment = replace(environment, incarnation=1)
        with self._display.activity("connecting the ranks"):
            mesh = Mesh.join(environment, self.config.train.device, _COLLECTIVE_LIMIT_S)
            self._mesh = stack.enter_context(mesh)
        self._memory = MemoryAccount(self._mesh.device)
        self._profiler = StepProfiler(self.config.run, self._mesh.rank)
        self._settle()

    def _settle(self) -> None:
        """Puts values in the place of "auto"."""
        model, train = self.config.model, self.config.train
        on_gpu = self._mesh.device.type == "cuda"
        if model.dtype == "auto":
            model = replace(model, dtype="bfloat16" if on_gpu else "float32")
        if train.activation_checkpointing == "auto":
            train = replace(train, activation_checkpointing="full" if on_gpu else "none")
        if train.compile == "auto":
            train = replace(train, compile=on_gpu and not compile_obstacle(model.path))
        self.config = replace(self.config, model=model, train=train)

    def _prepare_rows(self, resumed_from: Path | None) -> None:
        """Rank 0 writes the tokenized rows, and all ranks read them."""
        num_train, self._identity = from_lead(
            self._mesh, lambda: prepare_rows(self.config, resumed_from, self._display)
        )
        self.config = config = self.config.with_steps(num_train)
        self._train_batches = self._batches("train")
        self._eval_batches = None if config.data.eval is None else self._batches("eval")
        self._order = PromptOrder(num_train, config.train.seed, shuffle=config.data.shuffle)

    def _batches(self, name: str) -> SftBatches:
        return SftBatches(
            rows=RowFiles.open(self._run_dir.rows / name),
            batch_size=self.config.sft.batch_size,
            layout=batch_layout(self.config.train, self._mesh.device.type),
            rank=self._mesh.rank,
            world_size=self._mesh.world_size,
        )

    def _resume(self, resumed_from: Path | None) -> None:
        if resumed_from is not None:
            with self._display.activity("loading the checkpoint"):
                self.step = self._checkpoints.load(resumed_from, self._models).step
        # Only now: a checkpoint that these settings do not fit belongs to those before.
        from_lead(self._mesh, lambda: record_settings(self.config, self._identity))
        self._first_step = self._saved_step = self.step
        versions = self._run_dir.versions
        newest = from_lead(self._mesh, lambda: newest_version(versions))
        self._versions = VersionCounter(versions, newest, writes=self._mesh.is_lead)

    def _open_reports(self, stack: ExitStack) -> None:
        config, is_lead = self.config, self._mesh.is_lead
        reporter = RunReporter.open(config, self._display, self.step, is_lead=is_lead)
        self._reporter = stack.enter_context(reporter)
        self._forecast = StopForecast(self.step, config.train.shutdown_grace_s, self._display.note)

    def _make_train_step(self) -> None:
        self._builder = MicroBatchBuilder(
            packed=self._models[POLICY].is_packed,
            dtype=getattr(torch, self.config.model.compute_dtype),
            device=self._mesh.device,
            aggregation="token",
            max_new_tokens=1,
        )
        self._train_step = TrainStep(
            self._models, self._builder, self.config.train, CrossEntropy(), self._display.note
        )

    def train(self) -> None:
        """Trains until `train.steps`, or until the ranks agree to stop; leaves a checkpoint and the
        results. Collective. Raises UmbraError on every rank if that is not possible."""
        train = self.config.train
        while self.step < train.total_steps:
            is_first = self.step == self._first_step and train.eval_at_start
            if is_first or (self.step and self._is_due(train.eval_every)):
                self._evaluate()
            if self._should_stop():
                break
            self._do_step()
            if self._is_due(train.checkpoint_every):
                self._save(in_background=True)
        else:
            self._evaluate()
        self._save()
        self._leave_results()

    def _do_step(self) -> None:
        step, config = self.step + 1, self.config
        with (
            self._forecast.training(),
            self._memory.phase("train"),
            self._profiler.step(step) as profile,
            span("step", step=step) as whole,
            self._display.activity(f"training step {step}"),
        ):
            batch = self._train_batches.in_order(self._order, self.step)
            row = self._train_step.run(batch, self.step)
        self.step = step
        row |= self._memory.take() | profile
        row |= {
            "time/step_s": whole.seconds,
            "sft/tokens": batch.metrics["tokens"],
            "sft/tokens_per_s": batch.metrics["all_tokens"] / whole.seconds,
            "sft/epoch": step * config.sft.batch_size / len(self._train_batches.rows),
        }
        self._reporter.step_done(step, row)

    def _evaluate(self) -> None:
        """Measures the loss of the held-out rows; a signal ends it without a result."""
        batches = self._eval_batches
        if batches is None:
            return
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        what = f"evaluating after step {self.step}"
        with span("evaluate", step=self.step), self._display.activity(what):
            for batch in batches.once():
                if self._should_stop():
                    return
                for micro_batch in chain.from_iterable(self._builder.build(batch)):
                    scores = self._models[POLICY].measure(micro_batch)
                    loss = -(micro_batch.weights * scores.logprobs).sum()
                    total += loss.double() * batch.metrics["tokens"]
        num_tokens = int(batches.rows.mask.sum())
        loss = float(sum_over_ranks(total)) / num_tokens
        self._reporter.evaluated_loss(self.step, loss, len(batches.rows))

    def _should_stop(self) -> bool:
        return any_rank(self._stop.requested or self._checkpoints.has_failed)

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _save(self, *, in_background: bool = False) -> None:
        """Checkpoints the state after the last step, unless that was done."""
        if self.step != self._saved_step:
            state = TrainerState(
                step=self.step,
                version=self._versions.next(self.step),
                world_size=self._mesh.world_size,
                seed=self.config.train.seed,
            )
            done, background = self._forecast.saving(), in_background
            with span("checkpoint", step=self.step), self._display.activity("saving a checkpoint"):
                self._checkpoints.save(state, self._models, done, in_background=background)
            self._saved_step = self.step
        if not in_background:
            self._checkpoints.finish()

    def _leave_results(self) -> None:
        """Writes export, summary, plot and report."""
        self._stop.disarm()
        run_dir = RunDir(self._checkpoints.folder.parent)  # it may have been moved
        config = replace(self.config, run=replace(self.config.run, dir=run_dir.path))
        stopped_by = agree_on_signal(self._stop.received)
        if config.train.export and not stopped_by:
            export_trained(config.as_trainer_config(), self._models, self._mesh, self._display)
        from_lead(self._mesh, lambda: self._report(config, stopped_by))

    def _report(self, config: SftConfig, stopped_by: str) -> None:
        summary = finish(
            config, self._reporter, steps=self.step, engine_restarts=0, stopped_by=stopped_by
        )
        for line in closing_lines(summary):
            self._display.note(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftBatches:
    """Deals rows to ranks and micro-batches, balanced by tokens. Every rank plans the whole batch
    and takes its part."""

    rows: RowFiles
    batch_size: int  # of all ranks
    layout: BatchLayout
    rank: int
    world_size: int

    def in_order(self, order: PromptOrder, step: int) -> TrainBatch:
        """The batch of a step (from 0). Passes follow each other without a gap: a batch may have
        the last rows of one and the first of the next. `order` needs no cursor, so a resumed run
        continues with the batch that it would have had."""
        first = step * self.batch_size
        found = [order.at(idx) for idx in range(first, first + self.batch_size)]
        return self._batch([row for _, row in found], [f"e{epoch}/{row}/0" for epoch, row in found])

    def once(self) -> Iterator[TrainBatch]:
        """All rows, in the order of the file; the last batch may be smaller."""
        for first in range(0, len(self.rows), self.batch_size):
            members = range(first, min(first + self.batch_size, len(self.rows)))
            yield self._batch(members, [f"eval/{row}/0" for row in members])

    def _batch(self, members: Sequence[int], sample_ids: Sequence[str]) -> TrainBatch:
        """`metrics` has the numbers of learned and of all tokens of the batch."""
        masks = [self.rows.mask[self.rows.span(row)] for row in members]
        lens = [len(mask) for mask in masks]
        prompt_lens = [int(np.argmax(mask)) for mask in masks]  # up to the first learned token
        shapes = [GroupShape(p, [n - p]) for n, p in zip(lens, prompt_lens, strict=True)]
        plan = plan_batch(
            shapes,
            self.world_size,
            num_micro_batches=self.layout.num_micro_batches,
            max_tokens_per_micro_batch=self.layout.max_tokens_per_micro_batch,
        )[self.rank]
        num_learned = sum(int(mask.sum()) for mask in masks)
        offsets = np.cumsum([0, *(lens[idx] for idx in plan.samples)]).astype(np.int32)
        tokens, mask = np.zeros(offsets[-1], np.int32), np.zeros(offsets[-1], np.uint8)
        for start, stop, idx in zip(offsets, offsets[1:], plan.samples, strict=False):
            tokens[start:stop] = self.rows.tokens[self.rows.span(members[idx])]
            mask[start:stop] = masks[idx]
        return TrainBatch(
            tokens=tokens,
            offsets=offsets,
            prompt_lens=np.asarray([prompt_lens[idx] for idx in plan.samples], np.int32),
            mask=mask,
            versions=np.zeros(len(tokens), np.int64),
            columns={},
            groups=_NO_GROUPS,
            sample_ids=[sample_ids[idx] for idx in plan.samples],
            mini_batches=[MiniBatch(plan.micro_batches, num_learned, len(members))],
            metrics={"tokens": float(num_learned), "all_tokens": float(sum(lens))},
        )
