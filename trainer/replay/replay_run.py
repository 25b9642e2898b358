"""The loop of `umbra replay`: that of `umbra.trainer.train`, with batches from a ledger."""

from __future__ import annotations

from functools import partial

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.errors import ConfigError
from umbra.trainer.algorithms.base import load_advantage_estimator, load_loss
from umbra.trainer.checkpoint.checkpoint_store import CheckpointStore
from umbra.trainer.checkpoint.run_dir import RunDir, VersionCounter
from umbra.trainer.checkpoint.trainer_state import TrainerState
from umbra.trainer.learning import add_advantages, decode_token, load_models, make_train_step
from umbra.trainer.logprob_check import LogprobCheck
from umbra.trainer.replay.ledger_batches import LedgerBatches
from umbra.trainer.replay.replay_plan import ReplayPlan
from umbra.trainer.replay.replay_report import ReplayReport, rows_of_run
from umbra.trainer.reporting.console import ProgressDisplay
from umbra.trainer.services.job_plan import collective_timeout_s
from umbra.trainer.services.services import batch_layout, user_folders
from umbra.trainer.world.mesh import Mesh, from_lead


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
