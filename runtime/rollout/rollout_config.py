from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from umbra.runtime.errors import ConfigError
from umbra.runtime.settings import Bounds, Checked, Count, FunctionName, Positive, Seconds, Settings


def _check_stop(stop: Sequence[str]) -> None:
    if "" in stop:
        raise ValueError("an empty text is in every completion: remove it")


OVERLONG: Final = "overlong"
"""Name of the part of a reward that punishes length; the others have those of their functions."""

NO_REWARD: Final = "umbra.runtime.rollout.agents.reward_function:no_reward"
"""Stands in for the reward function where a teacher alone teaches."""

TopK = Annotated[int, Bounds(ge=0, zero="all tokens")]
StopTextsSetting = Annotated[tuple[str, ...], Checked(_check_stop)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings(Settings):
    """`[rollout]`: how completions are made.

    Attributes:
        groups_per_step: Prompts per optimizer step. More make the gradient less noisy and the step
            longer. Where the data has fewer, some come more than once.
        group_size: Completions per prompt. Advantages compare them, so more give a better baseline
            and take more generation. 1 needs `train.advantage` "gae", "reinforce", "none" or a
            function of your own.
        max_new_tokens: Largest number of tokens generated for one completion, over all turns of an
            agent loop.
        temperature: Higher values explore more.
        top_p: Only the most probable tokens with at least this share of the probability are
            sampled. The trainer scores tokens under the same truncation. Default: 1, all tokens.
        top_k: Only so many of the most probable tokens are sampled; `top_p` then counts among them.
            Default: 0, all tokens.
        stop_token_ids: Tokens that end a completion, besides the model's own end-of-text tokens.
        stop: Texts that end a completion, special tokens included, or a turn of an agent loop. It
            ends with the token that completes one. Evaluations and `umbra serve` use them, too.
        skip_special_tokens: Whether texts of completions, for rewards, `ctx.decode` and answers of
            auxiliary pools, leave out all special tokens, and not only end-of-text and padding
            tokens.
        max_staleness: How many optimizer steps old a token may be when it is trained on
            (docs/asynchronous.md). 0 is synchronous and on-policy.
        batch_order: "in_order" follows the order of the data, so that batches contain long
            completions as often as short ones. "first_finished" takes the prompts that are scored
            first (docs/asynchronous.md).
        over_sampling: Prompts generated for each one that is needed. Above 1, a batch consists of
            those that finish first, and the others are dropped when they become too old.
        drop_zero_variance_groups: Replace prompts whose completions all have the same reward,
            because nothing can be learned from them. The run ends after as many in a row as the
            data has prompts, and at least 1000 and 10 steps' worth.
        max_failed_share: Largest share of the last 200 prompts that may be dropped because user
            code failed: 0.05 allows 10. Exceeding it ends the run, and so do the first prompts if
            all fail. 1 allows any number.
        ledger_gb: Size of the newest part of the ledger's log, in 10^9 bytes, that keeps all
            tokens. Older samples that no checkpoint needs are reduced to their facts, and to the
            texts of the best and the worst of each step.
        workers: Processes that run rewards and agent loops, on each node with ranks. More help
            where user code computes.
        agent: "module:function" of an agent loop. Without one, each completion is one generation.
        agent_concurrency: Agent loops run concurrently per worker process. Lower values leave
            engines idle, as each takes `pool.max_num_seqs` at a time; higher values make it slower
            to find a loop that crashes its process. Default: 1.25 times `pool.max_num_seqs`.
        agent_timeout_s: Limit for one run of the agent loop, excluding time spent waiting for
            auxiliary pools.
        agent_retries: How often the loop of one completion may raise, block or exceed its limit and
            be run again. What it had generated is replayed.
        block_limit_s: How long an agent loop may keep the others of its process from running, at
            most half of `agent_timeout_s`. Exceeding it fails the loop and restarts the process.
            Three prompts that do so, with no loop that returns in between, end the run.
        timeout_s: How long ranks wait for a batch before they fail the run as stuck.
    """

    groups_per_step: Positive = 32
    group_size: Positive = 8
    max_new_tokens: Positive = 1024
    temperature: Annotated[float, Bounds(ge=0)] = 1.0
    top_p: Annotated[float, Bounds(gt=0, le=1)] = 1.0
    top_k: TopK = 0
    stop_token_ids: tuple[Count, ...] = ()
    stop: StopTextsSetting = ()
    skip_special_tokens: bool = False
    max_staleness: Count = 0
    batch_order: Literal["in_order", "first_finished"] = "in_order"
    over_sampling: Annotated[float, Bounds(ge=1)] = 1.0
    drop_zero_variance_groups: bool = False
    max_failed_share: Annotated[float, Bounds(ge=0, le=1)] = 0.05
    ledger_gb: Annotated[float, Bounds(gt=0)] = 8.0
    workers: Positive = 1
    agent: FunctionName | None = None
    agent_concurrency: Positive | None = None
    agent_timeout_s: Seconds = 600.0
    agent_retries: Count = 1
    block_limit_s: Seconds = 30.0
    timeout_s: Seconds = 1800.0

    @property
    def sampling(self) -> SamplingOptions:
        return SamplingOptions(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=self.stop_token_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig(Settings):
    """How requests reach the engines of one pool.

    Attributes:
        pool: name of the engine pool. An engine's tokens have one reader, so a pool has one rollout
            manager or one generator.
        max_context_len: longest prompt + completion in tokens.
        vocab_size: tokens outside it are refused; 0 leaves that to engines.
        max_running_per_engine: requests that an engine works on at a time, its `max_num_seqs`.
        max_inflight_per_engine: requests given to an engine at a time. Below
            `max_running_per_engine` it idles; far above, an engine that joins late finds no work.
        engine_timeout_s: how long work may wait while no engine of the pool serves.
        delta_timeout_s: how long a serving engine that has work may stay silent.
        submit_timeout_s: deadline for an engine to accept requests.
        shares_memory: the pool has time slices, so the supervisor has to know
            whether there is work.
    """

    pool: str
    max_context_len: Positive
    vocab_size: Count = 0
    max_running_per_engine: Positive = 256
    max_inflight_per_engine: Positive = 256
    engine_timeout_s: Seconds = 600.0
    delta_timeout_s: Seconds = 120.0
    submit_timeout_s: Seconds = 30.0
    shares_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout(Settings):
    """How the groups of a step become the ranks' mini-batches and micro-batches.

    Attributes:
        mini_batches: see `[train]`; it divides the number of groups.
        num_micro_batches: per rank and mini-batch; ignored where `max_tokens_per_micro_batch` is
            set.
        max_tokens_per_micro_batch: each distinct prompt counts once; 0 means no cap. A sample
            longer than the cap gets a micro-batch of its own.
        mask_truncated: see `[train]`.
    """

    mini_batches: Positive = 1
    num_micro_batches: Positive = 1
    max_tokens_per_micro_batch: Count = 0
    mask_truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig(Settings):
    """The settings of one rollout manager: the user's, and the trainer's additions.

    Attributes:
        settings: the user's, with the model's own end-of-text tokens among `stop_token_ids`.
        dispatch: to the pool that generates.
        prompts_path: prompt file of the training set, as `write_prompts` makes it.
        tokenizer_path: used for stop texts only.
        eval_path: prompt file of the held-out sets; "" where nothing is evaluated.
        eval_sets: names and numbers of prompts of the sets in that file, in its order. An
            evaluation scores each of them, besides all prompts together.
        eval_samples: completions of each held-out prompt.
        eval_max_new_tokens: their largest number of tokens; None for that of `settings`.
        eval_top_p, eval_top_k: see `SamplingOptions`.
        world_size: number of trainer ranks that call `next_batch` together.
        worker_names: names of the `RolloutWorker` actors that score and run agent loops.
        seed: decides the order of prompts and every trajectory's sampling seed.
        shuffle: False keeps the prompt file's order in every epoch.
        layout: of batches.
        overlong_buffer, overlong_penalty: see `[reward]`.
        teacher: name of the teacher's `GeneratorService`; that of the pool if the policy is its own
            teacher; "" without a teacher.
        reward_parts: names of the parts of rewards that advantages compare apart, in order; none
            for the rewards.
        ledger_path: folder of this manager's ledger; "" records nothing.
        pools_timeout_s: added to the deadlines of rewards and agent loops here, since workers do
            not count the wait for auxiliary pools.
        accuracy_threshold: in `evaluate`, a sample counts as right from this reward on.
        rank_timeout_s: how long ranks may be apart when they call `next_batch`.
        reward_timeout_s: deadline of one call of the reward function, from its beginning.
        score_concurrency: calls of the reward function in progress per rollout worker.
        max_worker_deaths: deaths of rollout workers that one job may see. From the second on it
            runs alone; the one after the last shows that it is the cause.
    """

    settings: RolloutSettings = field(default_factory=RolloutSettings)
    dispatch: DispatchConfig
    prompts_path: str
    tokenizer_path: str = ""
    eval_path: str = ""
    eval_sets: Mapping[str, int] = field(default_factory=dict[str, int])
    eval_samples: Positive = 1
    eval_max_new_tokens: Positive | None = None
    eval_top_p: float = 1.0
    eval_top_k: Count = 0
    world_size: Positive
    worker_names: tuple[str, ...]
    seed: Count = 0
    shuffle: bool = True
    layout: BatchLayout = BatchLayout()
    overlong_buffer: Count = 0
    overlong_penalty: Annotated[float, Bounds(gt=0, le=1e6)] = 1.0
    teacher: str = ""
    reward_parts: tuple[str, ...] = ()
    ledger_path: str = ""
    pools_timeout_s: Annotated[float, Bounds(ge=0)] = 0.0
    accuracy_threshold: float = 1.0
    rank_timeout_s: Seconds = 120.0
    reward_timeout_s: Seconds = 120.0
    score_concurrency: Positive = 4
    max_worker_deaths: Count = 3

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if not self.worker_names:
            raise ConfigError("worker_names is empty: nobody could compute rewards")

    @property
    def ledger_folder(self) -> Path | None:
        return Path(self.ledger_path) if self.ledger_path else None

    @property
    def worker_concurrency(self) -> dict[str, int]:
        """Calls in progress per rollout worker, by method."""
        if not self.settings.agent:
            return {"score": self.score_concurrency}
        loops = self.settings.agent_concurrency or self.dispatch.max_inflight_per_engine
        return {"score": self.score_concurrency, "run_agent": loops}

    def eval_sampling(self, temperature: float) -> SamplingOptions:
        return SamplingOptions(
            temperature=temperature,
            top_p=self.eval_top_p,
            top_k=self.eval_top_k,
            stop_token_ids=self.settings.stop_token_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxiliaryPoolConfig:
    """A worker's settings for a pool that user code may call. `timeout_s` includes a wake-up."""

    generator: str
    tokenizer_path: str
    timeout_s: float
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    skip_special_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The settings of one rollout worker.

    Attributes:
        tokenizer_path: opened for the first completion, since rank 0 may not have written it yet.
        rewards: `module:function` of each reward function, by name; the name of a single one is
            empty. There may be none if agent loops give every reward themselves.
        reward_weights: by name; 1 where none is given.
        reward_timeout_s: see `[reward]`, `timeout_s`.
        agent: `module:function` of the agent loop.
        sys_path: folders of user code, put in front of the import path.
        block_limit_s: how long asynchronous user code may block the event loop before the process
            reports the sample and ends. With an asynchronous reward function, at most half of
            `reward_timeout_s`: a blocking call is found before others beside it time out.
        pools: auxiliary pools, by name.
        skip_special_tokens: see `RolloutSettings`.
        chat_template_kwargs: variables of the policy's chat template.
    """

    tokenizer_path: str
    rewards: Mapping[str, str] = field(default_factory=dict[str, str])
    reward_weights: Mapping[str, float] = field(default_factory=dict[str, float])
    reward_timeout_s: float = 120.0
    agent: str | None = None
    sys_path: tuple[str, ...] = ()
    block_limit_s: float = 30.0
    pools: Mapping[str, AuxiliaryPoolConfig] = field(default_factory=dict[str, AuxiliaryPoolConfig])
    skip_special_tokens: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the tokens of a generation are sampled, and what ends it; the same for all
    turns of a sample."""

    temperature: float  # 0 is greedy
    top_p: float = 1.0  # 1: all tokens
    top_k: int = 0  # 0: all tokens
    stop_token_ids: Sequence[int] = ()  # a generation ends after any of these

    def request_fields(self) -> dict[str, Any]:
        """The request's fields, without top-p and top-k where they are not used."""
        fields: dict[str, Any] = {
            "temperature": self.temperature,
            "stop_token_ids": self.stop_token_ids,
        }
        if self.temperature and self.top_p < 1:
            fields["top_p"] = self.top_p
        if self.temperature and self.top_k:
            fields["top_k"] = self.top_k
        return fields
