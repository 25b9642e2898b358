"""The processes a run needs besides its ranks: engines, rollout manager, rollout workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy
from umbra.runtime.cluster.placement import Plan
from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.errors import UmbraError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rollout.ledger.ledger_history import ledger_folder
from umbra.runtime.rollout.rollout_config import (
    BatchLayout,
    DispatchConfig,
    RolloutConfig,
    WorkerConfig,
)
from umbra.runtime.session.session import Session
from umbra.runtime.text.model_files import default_context_len, vocab_size
from umbra.runtime.text.model_tokenizer import ModelTokenizer, tokenizer_path
from umbra.trainer.checkpoint.run_dir import run_began_at
from umbra.trainer.config.trainer_config import ServeConfig, TrainerConfig, TrainSection
from umbra.trainer.data.prompt_preparation import PromptBudget, PromptFiles
from umbra.trainer.reporting.console import Count, ProgressDisplay
from umbra.trainer.services.pool_specs import (
    TEACHER,
    auxiliary_pool_spec,
    generator_name,
    generator_spec,
    open_auxiliary_tokenizer,
    pool_spec,
    worker_pool_configs,
)
from umbra.trainer.world.run_files import writing

POOL: Final = "policy"
MANAGER: Final = "rollouts"
DEFAULT_MICRO_BATCH_TOKENS: Final = {"cpu": 2048, "cuda": 16384}
"""Tokens per micro-batch if the config does not set it. On a CPU, more do not fit its caches, and
fewer pay more for Python; on a GPU, more take memory, and fewer leave it idle."""
# A worker runs user code, which may crash it for transient reasons. `max_failed_share` bounds how
# often bad prompts may end it; one bad prompt costs four incarnations.
_WORKER_RESTARTS: Final = RestartPolicy(
    mode="on_failure", max_restarts=50, window_s=600.0, backoff_max_s=2.0
)
# The manager gives up its connection to a silent engine so much later than the supervisor kills
# the engine: until then the manager waits for the engine's death.
_DELTA_MARGIN_S: Final = 20.0
_COUNT_LIMIT_S: Final = 1.0
"""The supervisor answers from memory. Nobody needs an old count."""
# A new manager resumes from the ledger.
_MANAGER_RESTARTS: Final = RestartPolicy(mode="on_failure", max_restarts=5, window_s=600.0)


class ServiceStarter:
    """Starts the processes in the background while the ranks load the model. Rank 0 only.

    The rollout workers come first, on all nodes with ranks. They import the user's functions, so a
    function that cannot be used on one of the nodes ends the run before an engine is started or a
    model is loaded. Each `start_*` returns at once; `wait()` raises the first error, if any.
    """

    def __init__(
        self,
        session: Session,
        config: TrainerConfig,
        executor: ThreadPoolExecutor,
        display: ProgressDisplay,
    ) -> None:
        self._session = session
        self._display = display
        self._executor = executor
        self._started: list[Future[object]] = []
        self._num_nodes = _count_nodes(session)
        for idx, spec in enumerate(worker_specs(config, self._num_nodes, config.run.dir)):
            self._start(partial(session.spawn, spec, node=idx // config.rollout.workers))
        self._workers = tuple(self._started)
        executor.submit(self._show_workers)

    @classmethod
    @contextmanager
    def open(
        cls, session: Session, config: TrainerConfig, display: ProgressDisplay
    ) -> Generator[ServiceStarter]:
        """Starts the workers; owns the threads that wait for processes to start. The threads are
        not joined: their waits end with the session at the latest."""
        num_starts = 3 + config.rollout.workers * _count_nodes(session) + len(config.pools)
        executor = ThreadPoolExecutor(num_starts, "umbra-start")
        try:
            yield cls(session, config, executor, display)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)

    def wait_for_workers(self) -> None:
        """Returns when all workers serve; raises the first error."""
        for future in self._workers:
            future.result()

    def start_engines(self, config: TrainerConfig, plan: Plan, device_type: str) -> None:
        """Starts engines once the workers serve; pools that share memory start one by one.
        `config` has what the memory plan settled; `device_type` is the trainer's."""
        in_turn: list[PoolSpec] = []
        for name in config.pools:
            spec = auxiliary_pool_spec(name, config, plan, device_type, POOL)
            if spec.mode == "colocated":
                in_turn.append(spec)
            else:
                self._start(partial(self._create_pools, config, [spec]))
        policy = engine_pool_spec(config, plan, device_type)
        self._start(partial(self._create_pools, config, [*in_turn, policy]))

    def _create_pools(self, config: TrainerConfig, specs: Sequence[PoolSpec]) -> None:
        self.wait_for_workers()
        for spec in specs:
            with starting_engines(self._display, self._session, spec):
                self._session.create_pool(spec)
            if spec.name in config.pools:
                self._session.spawn(generator_spec(spec.name, config))

    def _show_workers(self) -> None:
        num_workers = len(self._workers)

        def count() -> Count:
            return sum(future.done() for future in self._workers), num_workers

        with self._display.activity("starting rollout workers", ask=count):
            wait(self._workers)

    def start_manager(
        self,
        config: TrainerConfig,
        prompts: PromptFiles,
        stop_token_ids: list[int],
        world_size: int,
        device_type: str,
    ) -> None:
        spec = manager_spec(
            config,
            prompts,
            stop_token_ids,
            world_size,
            device_type,
            self._num_nodes,
            config.run.dir,
        )
        self._start(partial(self._session.spawn, spec))

    def _start(self, start: Callable[[], object]) -> None:
        future = self._executor.submit(start)
        future.add_done_callback(self._on_started)
        self._started.append(future)

    def _on_started(self, future: Future[object]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            with contextlib.suppress(UmbraError):
                self._session.supervisor_call("fail_job", "starting the run", str(error))

    def wait(self) -> None:
        """Returns when all processes serve; raises the first error."""
        for future in self._started:
            future.result()


def starting_engines(
    display: ProgressDisplay, session: Session, spec: PoolSpec
) -> contextlib.AbstractContextManager[object]:
    """Shows how many engines of a pool have started, while the block starts them."""

    def count() -> Count:
        states: list[dict[str, Any]] = session.lead_call(
            "pool_states", spec.name, timeout_s=_COUNT_LIMIT_S
        )
        num_started = sum(state["state"] != EngineState.STARTING for state in states)
        return num_started, spec.count

    pool = "" if spec.name == POOL else f" of pool {spec.name}"
    return display.activity(f"starting {spec.engine} engines{pool}", ask=count)


def engine_pool_spec(
    config: TrainerConfig | ServeConfig,
    plan: Plan,
    device_type: str,
    *,
    load_weights: bool = False,
) -> PoolSpec:
    """The pool of engines that generate. `device_type` is the trainer's; with `load_weights`,
    engines load the model's weights themselves, without a trainer."""
    return pool_spec(
        POOL,
        config.pool,
        plan,
        model_path=config.model.path,
        dtype=config.model.dtype,
        device_type=device_type,
        max_context_len=max_context_len(config),
        load_weights=load_weights,
        lora_rank=0 if load_weights else config.model.lora.synced_rank,
        start_timeout_s=config.pool.sync_timeout_s,
        bucket_nbytes=config.pool.sync_bucket_mib << 20,
    )


def _count_nodes(session: Session) -> int:
    return max(1, len(session.nodes))


def worker_specs(config: TrainerConfig, num_nodes: int, folder: Path) -> list[ActorSpec]:
    """The processes that run the user's reward function and agent loop, one node after the other.
    `save_tokenizers` writes their tokenizers into `folder`, also after they have started."""
    worker = WorkerConfig(
        tokenizer_path=str(tokenizer_path(folder.absolute(), POOL)),
        rewards=config.reward.targets,
        reward_weights=config.reward.weights,
        reward_timeout_s=config.reward.timeout_s,
        agent=config.rollout.agent,
        sys_path=tuple(user_folders(config)),
        # Otherwise the other loops would reach their own deadlines while one blocks them.
        block_limit_s=min(config.rollout.block_limit_s, config.rollout.agent_timeout_s / 2),
        pools=worker_pool_configs(config, folder.absolute()),
        skip_special_tokens=config.rollout.skip_special_tokens,
        chat_template_kwargs=config.data.chat_template_kwargs,
    )
    return [
        ActorSpec(
            name=name,
            target="umbra.runtime.rollout.agents.rollout_worker:RolloutWorker",
            kwargs={"config": worker},
            restart=_WORKER_RESTARTS,
            role="rollout",
            frees_main_thread=True,
        )
        for name in worker_names(config, num_nodes)
    ]


def save_tokenizers(config: TrainerConfig, policy: ModelTokenizer, folder: Path) -> None:
    """Saves the policy's tokenizer and the other pools' in `folder`. Raises DataError for a pool's
    unusable tokenizer, RunDirectoryError if `folder` is full or the like."""
    pools = {name: open_auxiliary_tokenizer(name, pool) for name, pool in config.pools.items()}
    for name, tokenizer in {POOL: policy, **pools}.items():
        path = tokenizer_path(folder, name)
        with writing("write", path):
            tokenizer.save(path)


def open_policy_tokenizer(config: TrainerConfig) -> ModelTokenizer:
    """Raises DataError if the policy's model has no usable tokenizer."""
    model, began_at = config.model, run_began_at(config.run.dir)
    return ModelTokenizer.open(
        model.path, trust_remote_code=model.trust_remote_code, began_at=began_at
    )


def user_folders(config: TrainerConfig) -> list[str]:
    """Folders searched for the user's functions, before Python's own path."""
    return [*(str(path.absolute()) for path in config.reward.python_path), str(Path.cwd())]


def worker_names(config: TrainerConfig, num_nodes: int) -> list[str]:
    return [f"worker-{idx}" for idx in range(config.rollout.workers * num_nodes)]


def manager_spec(
    config: TrainerConfig,
    prompts: PromptFiles,
    stop_token_ids: list[int],
    world_size: int,
    device_type: str,
    num_nodes: int,
    folder: Path,
) -> ActorSpec:
    """The rollout manager. `stop_token_ids` are the model's and the config's; rollout workers are
    on `num_nodes` nodes; `folder` is that of `save_tokenizers`."""
    train = config.train
    teacher = generator_name(TEACHER) if TEACHER in config.pools else POOL
    manager = RolloutConfig(
        settings=replace(config.rollout, stop_token_ids=tuple(stop_token_ids)),
        dispatch=DispatchConfig(
            pool=POOL,
            max_context_len=max_context_len(config),
            vocab_size=vocab_size(config.model.path),
            max_running_per_engine=config.pool.num_seqs,
            max_inflight_per_engine=config.pool.max_inflight_per_engine,
            engine_timeout_s=config.pool.sync_timeout_s,
            delta_timeout_s=config.pool.stall_limit_s + _DELTA_MARGIN_S,
            shares_memory=any(pool.mode == "colocated" for pool in config.pools.values()),
        ),
        prompts_path=str(prompts.train_path.absolute()),
        tokenizer_path=str(tokenizer_path(folder.absolute(), POOL)),
        eval_path=str(prompts.eval_path.absolute()) if prompts.eval_path else "",
        eval_sets=prompts.eval_sets,
        eval_samples=config.eval.samples,
        eval_max_new_tokens=config.eval.max_new_tokens,
        eval_top_p=config.eval.top_p,
        eval_top_k=config.eval.top_k,
        world_size=world_size,
        worker_names=tuple(worker_names(config, num_nodes)),
        seed=train.seed,
        shuffle=config.data.shuffle,
        layout=batch_layout(train, device_type),
        overlong_buffer=config.reward.overlong_buffer,
        overlong_penalty=config.reward.overlong_penalty,
        reward_parts=tuple(config.compared_parts),
        teacher=teacher if train.teacher_kl_coef else "",
        ledger_path=str(ledger_folder(config.run.dir.absolute(), MANAGER)),
        # The longest that ranks wait for a batch, and so for anything that it needs.
        pools_timeout_s=config.rollout.timeout_s if config.pools else 0.0,
        accuracy_threshold=config.reward.accuracy_threshold,
        reward_timeout_s=config.reward.timeout_s * len(config.reward.targets),
    )
    return ActorSpec(
        name=MANAGER,
        target="umbra.runtime.rollout.manager.rollout_manager:RolloutManager",
        kwargs={"config": manager},
        restart=_MANAGER_RESTARTS,
        role="manager",
    )


def batch_layout(train: TrainSection, device_type: str) -> BatchLayout:
    tokens = train.max_tokens_per_micro_batch or DEFAULT_MICRO_BATCH_TOKENS[device_type]
    return BatchLayout(
        mini_batches=train.mini_batches,
        num_micro_batches=max(1, train.micro_batches),
        max_tokens_per_micro_batch=0 if train.micro_batches else tokens,
        mask_truncated=train.mask_truncated,
    )


def max_context_len(config: TrainerConfig | ServeConfig) -> int:
    """Longest prompt + completion: as configured, else the model's limit, at most 4096."""
    return config.pool.max_context_len or default_context_len(config.model.path)


def prompt_budget(config: TrainerConfig) -> PromptBudget:
    return PromptBudget(
        max_context_len=max_context_len(config),
        max_new_tokens=config.rollout.max_new_tokens,
        eval_max_new_tokens=config.eval.max_new_tokens,
    )
