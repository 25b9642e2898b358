"""The loop of `umbra replay`: that of `umbra.trainer.train`, with batches from a ledger."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.dash.sample_texts import PROMPTS, open_ledger
from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.dispatch.trajectory import Group, Trajectory
from umbra.runtime.rollout.ledger.sample_accounts import SampleRow
from umbra.runtime.rollout.ledger.sample_contents import SampleContent
from umbra.runtime.rollout.manager.batch_answers import BatchAnswers
from umbra.runtime.rollout.prompts import PromptSet
from umbra.runtime.rollout.rollout_config import BatchLayout
from umbra.trainer.algorithms.base import load_advantage_estimator, load_loss
from umbra.trainer.checkpoint.checkpoint_store import CheckpointStore
from umbra.trainer.checkpoint.run_dir import RunDir, VersionCounter, record_settings
from umbra.trainer.checkpoint.trainer_state import TrainerState
from umbra.trainer.data.train_batch import TrainBatch
from umbra.trainer.learning import add_advantages, decode_token, load_models, make_train_step
from umbra.trainer.logprob_check import LogprobCheck
from umbra.trainer.replay.replay_plan import ReplayPlan
from umbra.trainer.reporting.console import ProgressDisplay
from umbra.trainer.reporting.metrics_loggers import MetricsLog, merge_steps, read_metrics
from umbra.trainer.reporting.metrics_plot import save_plot
from umbra.trainer.reporting.run_reporter import write_report
from umbra.trainer.services.job_plan import collective_timeout_s
from umbra.trainer.services.services import batch_layout, user_folders
from umbra.trainer.world.mesh import Mesh, from_lead
from umbra.trainer.world.run_files import check_writable, writing

_COMPARED: Final = ("train/", "critic/")
"""Begin the names of metrics that a replay computes as the run has computed them."""
_SHOWN: Final = {
    "loss": "train/loss",
    "grad norm": "train/grad_norm",
    "critic loss": "critic/loss",
}
_BESIDE: Final = "run/"
"""Put in front of the name of such a metric where its value is the run's."""
_ROUNDING: Final = 1e-3
"""Relative, of gradient norms. Less takes rounding for another loss; more takes that for none."""
_UNKNOWN: Final = "rollout/refilled_tokens"
"""Work of the engines that the ledger does not have."""


def replay(plan: ReplayPlan, environment: TorchrunEnvironment, display: ProgressDisplay) -> None:
    """Trains the steps of `plan` again, and leaves metrics, a checkpoint and a report in a
    directory of its own. Every rank calls it. Raises UmbraError if that is not possible."""
    config = plan.config
    folders = user_folders(config)
    loss = load_loss(config.train.loss, folders)
    estimate = load_advantage_estimator(config.train.advantage, folders)
    versions = VersionCounter(RunDir(plan.run_dir).versions, 0, writes=False)
    check = _logprob_check(plan, versions, display) if plan.is_exact else None
    with Mesh.join(environment, config.train.device, collective_timeout_s(config)) as mesh:
        models = load_models(config, mesh, display)
        if plan.start is not None:
            store = CheckpointStore(plan.start.parent, mesh, keep=1)
            with display.activity("loading the checkpoint"):
                if damage := store.find_damage(plan.start):
                    raise ConfigError(
                        f"the checkpoint {plan.start} is damaged: {damage}: restore it from a "
                        "backup, or begin behind another one"
                    )
                store.load(plan.start, models)
        batches = LedgerBatches(
            plan.run_dir,
            tuple(config.compared_parts),
            batch_layout(config.train, mesh.device.type),
            mesh.world_size,
            has_teacher=config.train.teacher_kl_coef > 0,
        )
        train_step = make_train_step(config, mesh, models, loss, display.note, check)
        report = ReplayReport(plan, display) if mesh.is_lead else None
        from_lead(mesh, lambda: report and report.begin())
        for step in range(plan.first - 1, plan.last):
            versions.current = batches.version(step)
            batch = batches.batch(step, mesh.rank)
            add_advantages(config, estimate, batch)
            row = train_step.run(batch, step)
            if report is not None:
                report.step_done(step + 1, batch.row | row)
        state = TrainerState(
            step=plan.last,
            version=batches.version(plan.last),
            world_size=mesh.world_size,
            seed=config.train.seed,
        )
        run_dir = RunDir(config.run.dir)
        CheckpointStore(run_dir.checkpoints, mesh, keep=1).save(state, models)
        from_lead(mesh, lambda: report and report.close())


def _logprob_check(
    plan: ReplayPlan, versions: VersionCounter, display: ProgressDisplay
) -> LogprobCheck:
    """Compares what the run has compared: with overrides, the weights in training are others than
    those that the engines had. Warns where the run did."""
    return LogprobCheck(
        plan.config.model.compute_dtype,
        plan.config.train.max_logprob_difference,
        versions,
        partial(decode_token, plan.run_dir),
        display.note,
        [row for _, row in sorted(rows_of_run(plan).items(), reverse=True)],
    )


Row = Mapping[str, float]


def rows_of_run(plan: ReplayPlan) -> dict[int, Row]:
    """The run's own metrics of the steps of the plan, as far as it has them."""
    rows = merge_steps(read_metrics(RunDir(plan.run_dir).metrics))
    return {int(row["step"]): row for row in rows if plan.first <= row["step"] <= plan.last}


class ReplayReport:
    """Writes a replay's metrics beside the run's into the replay's directory, which others read as
    a run's. Rank 0 has one."""

    def __init__(self, plan: ReplayPlan, display: ProgressDisplay) -> None:
        self._plan = plan
        self._display = display
        self._run_dir = RunDir(plan.config.run.dir)
        self._of_run = rows_of_run(plan)
        self._difference = ""  # the first one
        self._has_own_gradients = False

    def begin(self) -> None:
        """Raises RunDirectoryError if the directory cannot be written."""
        check_writable(self._run_dir.path)
        record_settings(self._plan.config, {})
        self._log = MetricsLog(self._run_dir.path, first_step=self._plan.first)
        self._display.note("numbers of the run itself are in brackets")

    def step_done(self, step: int, row: Row) -> None:
        beside = {
            name: value
            for name, value in self._of_run.get(step, {}).items()
            if name.startswith(_COMPARED)
        }
        shown = {name: value for name, value in row.items() if name != _UNKNOWN}
        self._log.write(step, shown | {f"{_BESIDE}{name}": beside[name] for name in beside})
        if self._plan.is_exact and not self._difference:
            self._difference = next(
                (
                    f"{name} of step {step} is {row.get(name)} and was {value}"
                    for name, value in beside.items()
                    if row.get(name) != value
                ),
                "",
            )
        norms = (each.get("train/grad_norm", math.nan) for each in (row, beside))
        self._has_own_gradients |= not math.isclose(*norms, rel_tol=_ROUNDING)
        numbers = "  ".join(
            f"{label} {row.get(name, 0.0):.5g} [{beside.get(name, 0.0):.5g}]"
            for label, name in _SHOWN.items()
            if name in row  # a critic's warm-up has no loss of the policy
        )
        self._display.note(f"step {step}/{self._plan.last}  {numbers}")

    def close(self) -> None:
        """Writes plot and report, and shows whether the replay is the run again."""
        run_dir = self._run_dir
        with writing("write", run_dir.plot):
            title = "\n".join([run_dir.path.name, *self._plan.overrides])
            save_plot(read_metrics(run_dir.metrics), run_dir.plot, title)
        write_report(run_dir.report, run_dir.path)
        if self._difference:
            self._display.note(
                f"warning: this replay is not the run again: {self._difference}. Usual causes: "
                "settings that a resume of the run has changed since, other hardware or libraries, "
                "another number of threads (OMP_NUM_THREADS), GPU kernels that add in no fixed "
                "order"
            )
        elif self._plan.is_exact and self._of_run:
            num_steps = len(self._of_run)
            self._display.note(f"all metrics of {num_steps} steps are the run's, bit for bit")
        elif not self._has_own_gradients:
            self._display.note(
                "note: all gradient norms are the run's. The optimizer's settings change those of "
                "later steps: replay more. Clipped, cispo, gspo and others are one loss until a "
                "batch's second optimizer step: try it with train.mini_batches=4"
            )
        for path in (run_dir.metrics, run_dir.checkpoints, run_dir.report, run_dir.plot):
            self._display.note(str(path))


class LedgerBatches:
    """The batches that a run has trained on, from its ledger, as its rollout manager delivered
    them. Every rank has one, and reads the files itself.

    Args:
        parts: names of the parts of rewards that advantages compare apart; none for the rewards.
        has_teacher: whether samples need its logprobs.
        layout: may differ from the run's, and so may `world_size`.
    """

    def __init__(
        self,
        run_dir: Path,
        parts: Sequence[str],
        layout: BatchLayout,
        world_size: int,
        *,
        has_teacher: bool,
    ) -> None:
        self._index = open_ledger(run_dir)
        self._prompts = PromptSet.open(run_dir / PROMPTS)
        self._parts = parts
        self._has_teacher = has_teacher
        self._layout = layout
        self._world_size = world_size

    def version(self, step: int) -> int:
        """The weights in training in step `step` (from 0); 0 if they were never published."""
        return self._index.table.newest_version(step)

    def batch(self, step: int, rank: int) -> TrainBatch:
        """A rank's part of the batch of step `step` (from 0). Raises ConfigError if the ledger does
        not have all of it."""
        rows = sorted(self._index.of_step(step), key=lambda row: (row.group.order_idx, row.uid))
        contents = self._index.contents(rows, with_teacher=self._has_teacher)
        groups = [
            Group(
                group.group_id,
                [self._trajectory(row, contents) for row in members],
                group.order_idx,
                self._parts,
            )
            for group, members in groupby(rows, key=lambda row: row.group)
        ]
        answers = BatchAnswers(groups, self._layout, self._world_size, {})
        return TrainBatch.from_answer(answers.of(rank))

    def _trajectory(self, row: SampleRow, contents: Mapping[int, SampleContent]) -> Trajectory:
        content, prompt = contents.get(row.uid), self._prompts.find(row.group.prompt_id)
        if content is None or content.logprobs is None or prompt is None:
            what = "its prompt is" if prompt is None else "its tokens are"
            raise ConfigError(
                f"sample {row.sample_id} of step {(row.step or 0) + 1} cannot be trained on again: "
                f"{what} no longer kept; replay later steps"
            )
        if missing := sorted(set(self._parts) - row.reward_parts.keys()):
            raise ConfigError(
                f"the ledger has the reward of {row.sample_id} without the part {missing[0]!r}: "
                "train.advantage = 'gdpo' needs a run with several rewards"
            )
        if self._has_teacher and content.teacher_logprobs is None:
            raise ConfigError(
                f"the ledger has no teacher's logprobs of {row.sample_id}: train.teacher_kl_coef "
                "needs a run that had one"
            )
        prompt_len = len(prompt.tokens if content.prompt is None else content.prompt)
        sample = Trajectory(
            row.sample_id,
            prompt,
            row.seed,
            budget=row.num_tokens,
            max_context_len=prompt_len + row.num_tokens,
        )
        if content.prompt is not None:
            sample.extend_context(content.prompt)
        sample.append_runs(row.runs(), content.tokens, content.logprobs)
        sample.finish(row.finish_reason)
        sample.reward, sample.reward_parts = row.reward, row.reward_parts
        sample.num_interruptions = row.interruptions
        if self._has_teacher:
            sample.teacher_logprobs = content.teacher_logprobs
        return sample
