"""Assembles a training run: processes, data, model, loop, and the results at the end."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.cluster.memory_plan import MemoryPlan
from umbra.runtime.cluster.placement import Node, Plan
from umbra.runtime.errors import (
    ActorError,
    ConfigError,
    DeadlineExceeded,
    JobFailed,
    TransportError,
    UmbraError,
)
from umbra.runtime.process.nvml import gpu_sizes
from umbra.runtime.reports.step_metrics import last_steps
from umbra.runtime.session.rollouts import Rollouts, SessionSync
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.settings import shown_settings
from umbra.runtime.text.model_tokenizer import ModelTokenizer, tokenizer_path
from umbra.trainer.algorithms.algorithm_loading import load_advantage_estimator, load_loss
from umbra.trainer.checkpoint.best_checkpoint import BestCheckpoint
from umbra.trainer.checkpoint.checkpoint_store import CheckpointStore
from umbra.trainer.checkpoint.model_export import export_policy
from umbra.trainer.checkpoint.run_dir import (
    RunDir,
    VersionCounter,
    begin_run,
    changed_settings,
    newest_version,
    record_settings,
)
from umbra.trainer.checkpoint.run_identity import (
    check_identity,
    instead_of_resuming,
    keeps_samples,
    run_identity,
)
from umbra.trainer.checkpoint.trainer_state import TrainerState
from umbra.trainer.config import setting_rules
from umbra.trainer.config.algorithm_names import LOSSES
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.data.kept_prompts import KeptPrompts
from umbra.trainer.data.prompt_preparation import prepare_prompts
from umbra.trainer.logprob_check import LogprobCheck
from umbra.trainer.loop import TrainingLoop
from umbra.trainer.model.host_offload import HostOffload
from umbra.trainer.model.micro_batches import MicroBatchBuilder
from umbra.trainer.model.model_loading import load_policy
from umbra.trainer.model.optimizer import PolicyOptimizer
from umbra.trainer.model.policy import Policy
from umbra.trainer.reporting.console import ProgressDisplay
from umbra.trainer.reporting.fatal_error_report import FatalErrorReporter
from umbra.trainer.reporting.memory_metrics import GpuMemorySeen
from umbra.trainer.reporting.metrics_log import MetricsLog, read_metrics
from umbra.trainer.reporting.metrics_loggers import LoggedRun, MetricsLoggers, logger_names
from umbra.trainer.reporting.run_reporter import RunReporter, closing_lines, finish
from umbra.trainer.services.memory_needs import plan_job_memory
from umbra.trainer.services.pool_placement import plan_pools
from umbra.trainer.services.services import (
    MANAGER,
    POOL,
    ServiceStarter,
    open_policy_tokenizer,
    prompt_budget,
    save_tokenizers,
    user_folders,
)
from umbra.trainer.step import TrainStep
from umbra.trainer.world.signals import StopSignals
from umbra.trainer.world.stop_forecast import StopForecast
from umbra.trainer.world.world import World, agree_on_signal, from_lead, pick_device, usable_gpus

# How long a rank that lost another one waits for the supervisor to report which rank or process
# failed first. The supervisor knows within milliseconds; a rank's own errors are delayed this long.
_CAUSE_TIMEOUT_S: Final = 1.0
# For the supervisors to write what all processes are doing, before this rank ends.
_BUNDLE_LIMIT_S: Final = 20.0
_LEAST_S: Final = 1800.0
"""Least timeout of a collective. Ranks that fail end the others through the session long before,
so it is for a network that drops packets. Less is too short for a rank that slowly reads its data
or writes the model."""
_MARGIN_S: Final = 240.0
"""A wait may take this much longer than its setting: by the margins of calls, and with auxiliary
pools, by starting the process that handles their requests."""


class Trainer:
    """One rank's run. `run()` is collective and returns when training has ended. `starter`, on rank
    0 only, has begun to start the rollout workers."""

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
        self._config = config
        self._session = session
        self._environment = environment
        self._stop = stop
        self._display = display
        self._fatal_errors = fatal_errors
        self._starter = starter
        self._run_dir = RunDir(config.run.dir)
        self._dtype: torch.dtype = getattr(torch, config.model.compute_dtype)

    def run(self) -> None:
        """Trains as configured. Raises UmbraError on every rank if that is not possible."""
        config = self._config
        folders = user_folders(config)
        loss = load_loss(config.train.loss, folders)
        estimate = load_advantage_estimator(config.train.advantage, folders)
        with contextlib.ExitStack() as stack:
            starter = self._starter
            plan, memory, device_type = self._plan_pools()
            config = self._config
            is_lead = starter is not None
            if is_lead:
                warnings = [f"warning: {each}" for each in setting_rules.warnings(config)]
                for line in (*warnings, *plan.table(memory.columns()), *memory.notes):
                    self._display.note(line)
                starter.start_engines(plan, device_type)
                self._serve_metrics()
            planned = memory.gpus if is_lead else ()
            gpu_memory = stack.enter_context(GpuMemorySeen.open(plan.nodes[0].gpus, planned))
            limit_s = collective_timeout_s(config)
            # torchrun's count of restarts may differ between nodes.
            environment = replace(self._environment, incarnation=self._session.incarnation)
            with self._display.activity("connecting the ranks"):
                world = stack.enter_context(World.join(environment, config.train.device, limit_s))
            stack.push(self._announce_failure)
            from_lead(world, lambda: starter.wait_for_workers() if starter else None)
            checkpoints = CheckpointStore(
                self._run_dir.checkpoints, world, config.train.keep_checkpoints
            )
            resumed_from = self._begin_run(world, checkpoints, environment.incarnation)
            num_prompts = from_lead(world, lambda: self._start_rollouts(starter, world))
            config = self._config = config.with_steps(num_prompts)
            policy, reference = self._load_policies(world)
            optimizer = PolicyOptimizer(policy.parameters, config.train)
            state = TrainerState(step=0, version=0, world_size=world.world_size, seed=0)
            if resumed_from is not None:
                with self._display.activity("loading the checkpoint"):
                    state = checkpoints.load(resumed_from, policy.parameters, optimizer.adamw)
            step = state.step
            offload = self._offload(world, policy, reference, optimizer)
            offload.release_cache()  # loading filled it, and engines are starting
            from_lead(world, lambda: starter.wait() if starter else None)
            rollouts = Rollouts(self._session, MANAGER)
            newest = from_lead(world, lambda: self._begin_rollouts(rollouts, state, resumed_from))
            versions = VersionCounter(self._run_dir.versions, newest, writes=world.is_lead)
            reporter = self._open_reporter(stack, world, step)
            forecast = StopForecast(step, config.train.shutdown_grace_s, self._display.note)
            loop = TrainingLoop(
                config=config,
                world=world,
                policy=policy,
                optimizer=optimizer,
                estimate=estimate,
                train_step=TrainStep(
                    policy,
                    optimizer,
                    self._builder(policy, world),
                    config.train,
                    loss,
                    reference,
                    self._logprob_check(world, versions),
                ),
                rollouts=rollouts,
                pool=self._session.pool(POOL),
                publisher=WeightPublisher(
                    SessionSync(self._session),
                    world.rank,
                    world.world_size,
                    policy.tensors,
                    self._dtype,
                    locate=offload.locate,
                    keeps_memory=not offload.moves_parameters,
                    on_read=partial(self._send_away, offload, gpu_memory)
                    if config.pool.mode == "hybrid"
                    else None,
                    link_host=self._session.tcp_host
                    or ("127.0.0.1" if config.pool.transport == "tcp" else ""),
                ),
                offload=offload,
                checkpoints=checkpoints,
                best=self._best(world, step),
                versions=versions,
                reporter=reporter,
                display=self._display,
                gpu_memory=gpu_memory,
                stop=self._stop,
                forecast=forecast,
                step=step,
            )
            self._stop.defer(self._session.pass_on_signal, forecast)
            loop.run()
            self._stop.disarm()
            if gpu_memory.seen_nbytes:
                self._display.note("GPU memory, planned and (seen in the last step):")
                for line in plan.table(memory.columns(gpu_memory.seen_nbytes)):
                    self._display.note(line)
            self._run_dir = RunDir(checkpoints.folder.parent)  # it may have been moved
            self._config = replace(config, run=replace(config.run, dir=self._run_dir.path))
            self._leave_results(world, policy, reporter, loop.step)

    def _begin_run(
        self, world: World, checkpoints: CheckpointStore, incarnation: int
    ) -> Path | None:
        """Prepares the run directory; returns the newest checkpoint whose files are intact."""
        damaged: list[Path] = []
        while True:
            path = from_lead(world, lambda: begin_run(self._config.run, incarnation, damaged))
            if path is None:
                return None
            with self._display.activity(f"checking {path.name}"):
                damage = checkpoints.find_damage(path)
            if not damage:
                if damaged:
                    self._display.note(f"resuming from the older checkpoint {path} instead")
                return path
            self._display.note(f"warning: the checkpoint {path} is damaged: {damage}")
            damaged.append(path)

    def _serve_metrics(self) -> None:
        """Lets the supervisor serve metrics for Prometheus, if configured. Called by rank 0."""
        if address := self._config.run.metrics_address:
            url = self._session.lead_call("serve_metrics", address)
            self._display.note(f"metrics for Prometheus: {url}")

    def _plan_pools(self) -> tuple[Plan, MemoryPlan, str]:
        """The places of ranks and engines, their memory, and the type of the ranks' device. Every
        rank makes the same plan, so that all report the same error."""
        device = pick_device(self._config.train.device, self._session.local_rank)
        if self._config.pool.count == 0 and not self._session.tcp_host:
            raise ConfigError(
                "pool.count = 0 leaves the engines to machines that join, and this job listens on "
                "no address: set UMBRA_HOST_ADDRESS to that of this host"
            )
        plan = plan_pools(self._config, POOL, device_type=device.type, nodes=self._nodes())
        memory = self._plan_memory(plan, device.type)
        return replace(plan, kv_num_tokens=memory.kv_num_tokens), memory, device.type

    def _nodes(self) -> list[Node]:
        others = self._session.nodes
        if others:
            return [
                Node(gpus=node.gpus, num_ranks=node.num_ranks, address=node.address)
                for node in others
            ]
        return [Node(gpus=usable_gpus(), num_ranks=self._environment.local_world_size)]

    def _plan_memory(self, plan: Plan, device_type: str) -> MemoryPlan:
        """Settles `train.activation_checkpointing`, too."""
        config = self._config
        gpu_nbytes = [node.gpu_nbytes for node in self._session.nodes]
        gpu_nbytes = gpu_nbytes or [gpu_sizes(plan.nodes[0].gpus)]
        memory, chosen = plan_job_memory(config, POOL, plan, gpu_nbytes, device_type)
        if config.train.activation_checkpointing == "auto":
            self._config = replace(
                config, train=replace(config.train, activation_checkpointing=chosen)
            )
            if memory.expected_nbytes:
                self._display.note(
                    f"chosen by the memory plan: train.activation_checkpointing = {chosen!r}"
                )
        return memory

    def _send_away(self, offload: HostOffload, gpu_memory: GpuMemorySeen) -> None:
        gpu_memory.look("sync")
        with self._stop.uninterruptible():  # otherwise a checkpoint could miss tensors in transit
            offload.send_away()

    def _announce_failure(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Reports the cause to the other ranks, before they notice that their collectives break. An
        error that is only the consequence of another rank's or process's end becomes JobFailed,
        which names that one."""
        if isinstance(error, RuntimeError | ActorError | TransportError):
            try:
                self._session.raise_if_lost(_CAUSE_TIMEOUT_S)
            except JobFailed as failure:
                raise failure from error
        is_late = isinstance(error, Exception) and _missed_deadline(error)
        if isinstance(error, UmbraError) and not is_late:
            self._fatal_errors.report(error)
        if isinstance(error, Exception) and not isinstance(error, JobFailed):
            with contextlib.suppress(UmbraError):
                found: str = self._session.supervisor_call(
                    "fail_job",
                    f"rank {self._session.rank}",
                    f"{type(error).__name__}: {error}",
                    is_late,
                    timeout_s=_BUNDLE_LIMIT_S if is_late else 2.0,
                )
                if found:
                    error.add_note(found)
        if isinstance(error, UmbraError):
            self._fatal_errors.report(error)

    def _start_rollouts(self, starter: ServiceStarter | None, world: World) -> int:
        """Tokenizes the data, records the settings and starts the manager. Called by rank 0.
        Returns the number of training prompts."""
        assert starter is not None
        config = self._config
        tokenizer = open_policy_tokenizer(config)
        identity = run_identity(config, tokenizer, user_folders(config))
        kept = None
        if keeps_samples(config.run.dir):
            remedy = instead_of_resuming(config.run.dir)
            check_identity(config.run.dir, identity, remedy, self._display.note)
            kept = KeptPrompts(config.run.dir, remedy, self._display.note)
        with self._display.activity("tokenizing the data", unit="prompts") as tokenizing:
            prompts = prepare_prompts(
                config.data,
                tokenizer,
                prompt_budget(config),
                folder=config.run.dir,
                min_prompts=world.world_size,
                groups_per_step=config.rollout.groups_per_step,
                on_prompt=tokenizing.count,
                kept=kept,
            )
        save_tokenizers(config, tokenizer, config.run.dir)  # not before a resume may be refused
        held_out = f", {prompts.num_eval:,} held out" if prompts.num_eval else ""
        self._display.note(f"{prompts.num_train:,} prompts to train on{held_out}")
        for warning in prompts.warnings:
            self._display.note(f"warning: {warning}")
        self._record_settings(config.with_steps(prompts.num_train), identity)
        stops = tokenizer.stop_token_ids(config.rollout.stop_token_ids)
        shown = ", ".join(f"{tokenizer.decode_all([token])!r} ({token})" for token in stops)
        self._display.note(f"completions end with {shown}")
        starter.start_manager(prompts, stops, world.world_size, world.device.type)
        return prompts.num_train

    def _record_settings(self, config: TrainerConfig, identity: Mapping[str, Any]) -> None:
        """Records the settings, with the steps of the epochs, and shows what is only known now."""
        train, display = config.train, self._display
        if train.epochs is not None:
            display.note(f"train.epochs = {train.epochs} are {train.total_steps:,} steps")
        for text in setting_rules.warnings(config):
            if text not in setting_rules.warnings(self._config):
                display.note(f"warning: {text}")
        if changed := changed_settings(config):
            display.note(f"changed since the last start: {', '.join(changed)}")
        record_settings(config, identity)

    def _begin_rollouts(
        self, rollouts: Rollouts, state: TrainerState, resumed_from: Path | None
    ) -> int:
        """Takes the ledger back to the checkpoint, which may be another run's. Called by rank 0.
        Returns the newest version that was ever used, because numbers are not reused."""
        is_own = resumed_from is not None and self._run_dir.holds(resumed_from)
        position = state.ledger if is_own else ""
        timeout_s = self._config.pool.sync_timeout_s
        kept = rollouts.begin(state.step, state.version, position, timeout_s)
        return max(kept["version"], state.version, newest_version(self._run_dir.versions))

    def _load_policies(self, world: World) -> tuple[Policy, Policy | None]:
        """The policy, and the frozen starting model if a KL term needs it."""
        with self._display.activity("loading the model"):
            policy = load_policy(self._config, world.mesh)
        num_parameters = sum(parameter.numel() for parameter in policy.parameters.values())
        self._display.note(f"model of {num_parameters / 1e6:,.1f} M parameters loaded")
        if self._config.train.kl_coef == 0.0:
            return policy, None
        with self._display.activity("loading the reference model"):
            return policy, load_policy(self._config, world.mesh).freeze()

    def _offload(
        self, world: World, policy: Policy, reference: Policy | None, optimizer: PolicyOptimizer
    ) -> HostOffload:
        tensors = list(policy.parameters.values())
        if reference is not None:
            tensors += reference.parameters.values()
        return HostOffload(
            self._config.train.offload,
            tensors,
            optimizer.adamw,
            world.device,
            on_release=self._session.report_gpu_memory,
        )

    def _builder(self, policy: Policy, world: World) -> MicroBatchBuilder:
        return MicroBatchBuilder(
            packed=policy.is_packed,
            dtype=self._dtype,
            device=world.device,
            aggregation=self._config.train.loss_aggregation,
            max_new_tokens=self._config.rollout.max_new_tokens,
            skips_neutral=self._config.train.kl_coef == 0.0 and self._config.train.loss in LOSSES,
        )

    def _best(self, world: World, step: int) -> BestCheckpoint | None:
        by = self._config.train.keep_best_by
        if by is None or not world.is_lead:
            return None
        rows = read_metrics(self._run_dir.metrics)
        return BestCheckpoint(self._run_dir.checkpoints, by, rows, step)

    def _logprob_check(self, world: World, versions: VersionCounter) -> LogprobCheck:
        model = self._config.model
        rows = from_lead(world, lambda: last_steps(self._run_dir.path))
        return LogprobCheck(
            model.compute_dtype,
            self._config.train.max_logprob_difference,
            versions,
            partial(_decode_token, self._config.run.dir),
            self._display.note,
            rows,
        )

    def _open_reporter(self, stack: contextlib.ExitStack, world: World, step: int) -> RunReporter:
        config = self._config
        total = config.train.total_steps
        self._display.begin_steps(config.run_name, step, total)
        if not world.is_lead:
            return RunReporter(config, self._display, None, steps_before=step)
        log = stack.enter_context(MetricsLog(config.run.dir, first_step=step + 1))
        logged = LoggedRun(
            folder=config.run.dir, name=config.run_name, settings=shown_settings(config)
        )
        loggers = MetricsLoggers(logger_names(config.run.loggers), logged, self._display.note)
        reporter = RunReporter(config, self._display, log, stack.enter_context(loggers), step)
        stack.push(self._announce_failure)  # before closing loggers, which may wait for servers
        if self._run_dir.replaced.exists():
            self._display.note(
                f"the earlier run is kept in {self._run_dir.replaced} until a step is done"
            )
        if step:
            self._display.note(f"resuming after step {step}")
            if step >= total:
                self._display.note(f"train.steps is {total}: no step is left to do")
        elif config.run.resume == "auto":
            self._display.note(
                f"no complete checkpoint in {self._run_dir.checkpoints}: starting from scratch"
            )
        return reporter

    def _leave_results(
        self, world: World, policy: Policy, reporter: RunReporter, steps: int
    ) -> None:
        """Writes export, summary, plot and report."""
        config = self._config
        stopped_by = agree_on_signal(self._stop.received)
        if config.train.export and not stopped_by:
            with self._display.activity("exporting the model"):
                export_policy(
                    policy, self._run_dir.export, world, source=config.model.path, dtype=self._dtype
                )
        from_lead(world, lambda: self._report(reporter, steps, stopped_by))

    def _report(self, reporter: RunReporter, steps: int, stopped_by: str) -> None:
        pools = [self._session.pool(name) for name in (POOL, *self._config.pools)]
        states = [state for pool in pools for state in pool.states()]
        summary = finish(
            self._config,
            reporter,
            steps=steps,
            engine_restarts=sum(int(state["num_restarts"]) for state in states),
            stopped_by=stopped_by,
        )
        for line in closing_lines(summary):
            self._display.note(line)


def _decode_token(run_dir: Path, token_id: int) -> str:
    return ModelTokenizer.open(tokenizer_path(run_dir)).decode_all([token_id])


def _missed_deadline(error: Exception) -> bool:
    """Whether something took too long. torch has no class of its own for a late collective."""
    if isinstance(error, UmbraError):
        return isinstance(error, DeadlineExceeded)
    return (
        isinstance(error, RuntimeError) and re.search("time(d )?out", str(error), re.I) is not None
    )


def collective_timeout_s(config: TrainerConfig) -> float:
    """The timeout of the ranks' process group in seconds.

    torch ends a rank, and with it the run, if a collective takes longer than the process group's
    timeout. Waits that a setting allows must not end like that:

       pool.sync_timeout_s             rank 0 waits for the first start of the engines, and for the
       pools.NAME.start_timeout_s      manager to begin; pools that share memory start one by one
       rollout.timeout_s               a rank that did not get an answer, because the manager was
                                       killed, asks again; the others have it and wait for this rank

    All other waits of a single rank are shorter than the least timeout, or have no limit. Waits of
    all ranks outside torch (for a weight sync or a batch) do not count.
    """
    in_turn_s = config.pool.sync_timeout_s + _MARGIN_S
    waits_s = [_LEAST_S, config.rollout.timeout_s + _MARGIN_S]
    for pool in config.pools.values():
        start_s = pool.start_timeout_s + _MARGIN_S
        if pool.mode == "colocated":
            in_turn_s += start_s
        else:
            waits_s.append(start_s)
    return max(in_turn_s, *waits_s)
