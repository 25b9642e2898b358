"""What a rollout manager is told at its start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from umbra.runtime.errors import ConfigError

BATCH_ORDERS: Final = ("in_order", "first_finished")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Settings of one rollout manager; travels as a plain dict (see `from_wire`).

    Attributes:
        prompts_path: prompt file of the training set, as `write_prompts` makes it.
        eval_path: prompt file of the held-out set; "" where nothing is evaluated.
        pool: name of the engine pool that generates.
        world_size: number of trainer ranks that call `next_batch` together.
        groups_per_step, group_size: prompts per batch and trajectories per prompt.
        max_new_tokens: budget of generated tokens per trajectory, over all its turns.
        max_context_len: longest prompt + completion in tokens, as the engines have it.
        vocab_size: of the model: agent loops' tokens outside it are refused; 0 leaves that to
            engines.
        rollout_actors: names of the `RolloutWorker` actors that score and run agent loops.
        temperature: of training rollouts; 0 is greedy.
        stop_token_ids: a trajectory's turn ends after any of these.
        seed: decides the order of prompts and every trajectory's sampling seed.
        shuffle: False keeps the prompt file's order in every epoch.
        num_micro_batches: micro-batches per rank; ignored where `max_tokens_per_micro_batch`
            is set.
        max_tokens_per_micro_batch: cap of a micro-batch's tokens, each distinct prompt counted
            once; 0 means no cap. A sample longer than the cap gets one of its own.
        max_staleness: how many optimizer steps old a token may be when it is trained on; 0 is
            synchronous.
        batch_order: "in_order": batches follow the order of the data, so that long rollouts are
            as often in them as short ones; "first_finished": whatever is scored first.
        over_sampling: groups generated for each one that is needed, 1.0 or more; the batch is
            made of the first that are done, and what gets too old is dropped.
        drop_zero_variance_groups: groups whose rewards are all equal, from which nothing can be
            learned, are dropped and other prompts take their place; see `ZeroVarianceGroups`.
        max_failed_share: so many of the last 200 groups, or of all so far, may be dropped because
            their reward or agent loop failed; one more ends the job.
        ledger_path: folder of this manager's ledger, see `umbra.runtime.rollout.ledger`; "" keeps
            nothing, and what a manager knows ends with its process.
        agent_retries: how often a trajectory's agent loop may fail by itself (raise, block, take
            too long) and be run again, with what it has generated replayed.
        agent: trajectories are driven by the workers' agent loop, not by one generation.
        shares_memory: the pool has it in turn with others, so the supervisor is told of work.
        pools_timeout_s: added to the deadlines of rewards and agent loops here, where they may
            wait for other pools: the workers do not count that.
        accuracy_threshold: in `evaluate`, a sample counts as right from this reward on.
        rank_timeout_s: how long ranks may be apart when they call `next_batch`.
        engine_timeout_s: how long work may wait while no engine of the pool serves.
        delta_timeout_s: how long a serving engine that has work may stay silent.
        submit_timeout_s: deadline for an engine to accept requests.
        reward_timeout_s: deadline of one call of the reward function.
        agent_timeout_s: deadline of one agent loop.
        max_inflight_per_engine: requests given to an engine at a time. Below the engine's
            `max_num_seqs` it idles; far above, an engine that joins late finds no work.
        score_concurrency, agent_concurrency: calls in progress per rollout worker.
        max_worker_deaths: how many deaths of rollout workers one piece of work may see. From the
            second on it runs alone; the one after the last shows that it is the cause.
    """

    prompts_path: str
    pool: str
    world_size: int
    groups_per_step: int
    group_size: int
    max_new_tokens: int
    max_context_len: int
    rollout_actors: list[str]
    eval_path: str = ""
    vocab_size: int = 0
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list[int])
    seed: int = 0
    shuffle: bool = True
    num_micro_batches: int = 1
    max_tokens_per_micro_batch: int = 0
    max_staleness: int = 0
    batch_order: str = "in_order"
    over_sampling: float = 1.0
    drop_zero_variance_groups: bool = False
    max_failed_share: float = 0.05
    ledger_path: str = ""
    agent: bool = False
    shares_memory: bool = False
    pools_timeout_s: float = 0.0
    agent_retries: int = 1
    accuracy_threshold: float = 1.0
    rank_timeout_s: float = 120.0
    engine_timeout_s: float = 600.0
    delta_timeout_s: float = 120.0
    submit_timeout_s: float = 30.0
    reward_timeout_s: float = 120.0
    agent_timeout_s: float = 600.0
    max_inflight_per_engine: int = 256
    score_concurrency: int = 4
    agent_concurrency: int = 32
    max_worker_deaths: int = 3

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> RolloutConfig:
        """Checks and converts the dict form; None means the default.

        Raises:
            ConfigError: an unknown or missing key, a wrong type or an impossible value.
        """
        known = {f.name: f for f in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigError(f"rollout.{key} is unknown; allowed: {', '.join(sorted(known))}")
        checked: dict[str, Any] = {}
        for name, spec in known.items():
            if values.get(name) is not None:
                checked[name] = _TYPE_CHECKS[str(spec.type)](name, values[name])
            elif spec.default is spec.default_factory is dataclasses.MISSING:
                raise ConfigError(f"rollout.{name} is missing")
        config = cls(**checked)
        config._check_ranges()
        return config

    def _check_ranges(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ConfigError(f"rollout.{name} must be positive, got {getattr(self, name)}")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ConfigError(f"rollout.{name} must not be negative: {getattr(self, name)}")
        if self.batch_order not in BATCH_ORDERS:
            raise ConfigError(
                f"rollout.batch_order {self.batch_order!r} is not one of {', '.join(BATCH_ORDERS)}"
            )
        if self.over_sampling < 1.0:
            raise ConfigError(f"rollout.over_sampling must be 1 or more, got {self.over_sampling}")
        if self.drop_zero_variance_groups and self.group_size == 1:
            raise ConfigError(
                "rollout.drop_zero_variance_groups with group_size 1 would drop every group: the "
                "rewards of a single trajectory are all equal"
            )
        if not self.rollout_actors:
            raise ConfigError("rollout.rollout_actors is empty: nobody could compute rewards")


_POSITIVE: Final = (
    "world_size",
    "groups_per_step",
    "group_size",
    "max_new_tokens",
    "max_context_len",
    "num_micro_batches",
    "rank_timeout_s",
    "engine_timeout_s",
    "delta_timeout_s",
    "submit_timeout_s",
    "reward_timeout_s",
    "agent_timeout_s",
    "max_inflight_per_engine",
    "score_concurrency",
    "agent_concurrency",
)
_NOT_NEGATIVE: Final = (
    "vocab_size",
    "temperature",
    "max_tokens_per_micro_batch",
    "seed",
    "max_worker_deaths",
    "max_staleness",
    "max_failed_share",
    "agent_retries",
    "pools_timeout_s",
)


def _one_of(*kinds: type) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if type(value) not in kinds:
            raise ConfigError(
                f"rollout.{name} must be {kinds[0].__name__}, got {type(value).__name__} {value!r}"
            )
        return kinds[0](value)

    return check


def _list_of(kind: type) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        items = cast(list[Any], value)
        if not isinstance(value, list | tuple) or any(type(item) is not kind for item in items):
            raise ConfigError(f"rollout.{name} must be a list of {kind.__name__}, got {value!r}")
        return list(items)

    return check


_TYPE_CHECKS: Final[dict[str, Callable[[str, Any], Any]]] = {
    "str": _one_of(str),
    "int": _one_of(int),
    "float": _one_of(float, int),
    "bool": _one_of(bool),
    "list[int]": _list_of(int),
    "list[str]": _list_of(str),
}
