"""Combinations of settings that are refused or warned about, as one table. A rule needs the config
alone; `umbra.trainer.services.setup_check` checks files and the number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from umbra.runtime.engine_api.engine_names import engine_kind
from umbra.trainer.config.algorithm_names import ADVANTAGE_ESTIMATORS, LOSSES
from umbra.trainer.config.trainer_config import TrainerConfig

_MOST_SAMPLE_CLIP: Final = 0.01
"""Clip of the ratio of a whole sample, which GSPO's authors set below 0.001. Ratios hardly ever get
as far from 1 as larger clips."""
_LEAST_ROUNDED_SHARE: Final = 512
"""bfloat16 rounds a change of a weight to nothing where it is less than a 512th of the weight."""
_USUAL_WEIGHT: Final = 0.02
"""Size of a usual weight of a language model, which is also what most are initialised with."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One combination of settings."""

    # "error" where nothing sensible can be meant; "warning" where the run works.
    severity: Literal["error", "warning"]
    settings: tuple[str, ...]  # full names; the message begins with their values
    applies: Callable[[TrainerConfig], bool]  # whether a config has the combination
    text: str  # what the combination does, and the remedy

    def message(self, config: TrainerConfig) -> str:
        given = " and ".join(f"{name} = {_value(config, name)!r}" for name in self.settings)
        return f"{given}: {self.text}"


def refusals(config: TrainerConfig) -> list[Rule]:
    return [rule for rule in RULES if rule.severity == "error" and rule.applies(config)]


def warnings(config: TrainerConfig) -> list[str]:
    """Combinations that work and are probably not meant, with the remedy."""
    return [
        rule.message(config)
        for rule in RULES
        if rule.severity == "warning" and rule.applies(config)
    ]


def _unused(name: str, because: str, is_so: Callable[[TrainerConfig], bool], remedy: str) -> Rule:
    """Warns about a setting that differs from its default and is not used."""

    def applies(config: TrainerConfig) -> bool:
        return is_so(config) and _value(config, name) != _default(config, name)

    text = f"{name} has no effect: {remedy}, or leave {name} out"
    return Rule("warning", (name, because), applies, text)


def _value(config: TrainerConfig, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def _default(config: TrainerConfig, name: str) -> Any:
    section, _, key = name.partition(".")
    fields = dataclasses.fields(getattr(config, section))
    return next(field.default for field in fields if field.name == key)


def _is_truncated(config: TrainerConfig) -> bool:
    """Whether tokens are sampled from a part of the distribution."""
    return config.rollout.top_p < 1 or config.rollout.top_k > 0


def _has_moving_masters(config: TrainerConfig) -> bool:
    """Whether a step of the learning rate changes a weight of the usual size."""
    if config.master_dtype != "bfloat16":
        return True
    return config.train.learning_rate * _LEAST_ROUNDED_SHARE >= _USUAL_WEIGHT


RULES: Final = (
    # rollouts
    Rule(
        "error",
        ("rollout.temperature",),
        lambda c: c.rollout.temperature == 0,
        "greedy completions of a prompt are all the same: set it above 0",
    ),
    Rule(
        "error",
        ("pool.engine", "rollout.top_p", "rollout.top_k"),
        lambda c: _is_truncated(c) and not engine_kind(c.pool.engine).truncates_logprobs,
        "this engine samples from a part of the distribution and reports the logprobs of all of "
        "it, so that the ratios in the loss would be wrong by the share that is left out: use "
        "pool.engine = 'vllm', or leave rollout.top_p and rollout.top_k out",
    ),
    Rule(
        "warning",
        ("rollout.top_p", "rollout.top_k", "rollout.max_staleness", "train.updates_per_batch"),
        lambda c: (
            _is_truncated(c) and (c.rollout.max_staleness > 0 or c.train.updates_per_batch > 1)
        ),
        "the trainer scores tokens among those that its own weights keep, and after an update "
        "these are not quite the ones that were sampled from: use rollout.max_staleness = 0 and "
        "train.updates_per_batch = 1, or leave rollout.top_p and rollout.top_k out",
    ),
    Rule(
        "error",
        ("rollout.group_size", "train.advantage"),
        lambda c: c.rollout.group_size < 2 and c.train.advantage in ADVANTAGE_ESTIMATORS,
        "advantages compare the completions of one prompt; that of a single one is always 0, and "
        "nothing would be learned: set rollout.group_size to 2 or more",
    ),
    Rule(
        "warning",
        ("rollout.max_staleness", "pool.mode"),
        lambda c: c.rollout.max_staleness > 0 and c.pool.mode == "hybrid",
        "engines sleep while the trainer works, so little is generated ahead: use pool.mode = "
        "'standalone', or rollout.max_staleness = 0",
    ),
    Rule(
        "warning",
        ("rollout.max_staleness", "train.loss"),
        lambda c: c.rollout.max_staleness > 0 and c.train.loss == "clipped",
        "tokens of older weights may be clipped before the first update: use train.loss = "
        "'decoupled'",
    ),
    *(
        _unused(
            f"rollout.{name}",
            "rollout.agent",
            lambda c: c.rollout.agent is None,
            "set rollout.agent",
        )
        for name in ("agent_concurrency", "agent_retries")
    ),
    # the loss
    Rule(
        "warning",
        ("train.loss", "train.loss_aggregation"),
        lambda c: c.train.loss == "gspo" and c.train.loss_aggregation != "sequence",
        "GSPO gives every sample the same weight: use train.loss_aggregation = 'sequence'",
    ),
    Rule(
        "warning",
        ("train.loss", "train.clip_eps_low", "train.clip_eps_high"),
        lambda c: (
            c.train.loss == "gspo"
            and max(c.train.clip_eps_low, c.train.clip_eps_high) > _MOST_SAMPLE_CLIP
        ),
        "the ratio of a whole sample stays so close to 1 that nothing is clipped: use "
        "train.clip_eps_low = 3e-4 and train.clip_eps_high = 4e-4",
    ),
    Rule(
        "warning",
        ("train.clip_eps_low", "train.clip_eps_high"),
        lambda c: (
            c.train.loss in LOSSES
            and c.train.loss != "cispo"
            and c.train.clip_eps_low == c.train.clip_eps_high == 0
        ),
        "any difference between the engines' logprobs and the trainer's clips a token: set both "
        "above 0, such as 0.2",
    ),
    *(
        _unused(
            f"train.{name}",
            "train.loss",
            lambda c: c.train.loss in LOSSES and c.train.loss != "decoupled",
            "use train.loss = 'decoupled'",
        )
        for name in ("importance_cap", "importance_above_cap", "importance_floor")
    ),
    _unused(
        "train.kl_estimator",
        "train.kl_coef",
        lambda c: c.train.kl_coef == 0,
        "set train.kl_coef above 0",
    ),
    # the optimizer
    Rule(
        "error",
        ("train.steps", "train.epochs"),
        lambda c: (c.train.steps is None) == (c.train.epochs is None),
        "the length of a run is given by one of the two: set it, and leave the other out",
    ),
    Rule(
        "error",
        ("train.warmup_steps", "train.warmup_ratio"),
        lambda c: c.train.warmup_steps > 0 and c.train.warmup_ratio > 0,
        "the warm-up is given by one of the two: leave the other out",
    ),
    Rule(
        "warning",
        ("train.warmup_steps", "train.steps"),
        lambda c: c.train.steps is not None and c.train.warmup_steps >= c.train.steps,
        "the learning rate rises until the run ends: use fewer steps of warm-up",
    ),
    _unused(
        "train.min_lr_ratio",
        "train.schedule",
        lambda c: c.train.schedule == "constant",
        "use train.schedule = 'linear' or 'cosine'",
    ),
    Rule(
        "warning",
        ("model.master_dtype", "train.learning_rate"),
        lambda c: not _has_moving_masters(c),
        f"bfloat16 rounds a change below 1/{_LEAST_ROUNDED_SHARE} of a weight to nothing, so that "
        "most weights stay as they are: use model.master_dtype = 'float32'",
    ),
    _unused(
        "train.max_tokens_per_micro_batch",
        "train.micro_batches",
        lambda c: c.train.micro_batches > 0,
        "set train.micro_batches to 0",
    ),
    Rule(
        "error",
        ("train.offload", "pool.mode"),
        lambda c: c.train.offload != "none" and c.pool.mode != "hybrid",
        "engines of a standalone pool do not share the trainer's memory: set train.offload to "
        "'none', or pool.mode to 'hybrid'",
    ),
    # evaluations
    *(
        _unused(
            name,
            "data.eval",
            lambda c: c.data.eval is None and not c.eval.sets,
            "name held-out prompts in data.eval",
        )
        for name in (
            "eval.samples",
            "eval.temperature",
            "eval.top_p",
            "eval.top_k",
            "eval.max_new_tokens",
            "data.eval_limit",
        )
    ),
    *(
        _unused(
            name,
            "eval.temperature",
            lambda c: c.eval.temperature == 0,
            "set eval.temperature above 0",
        )
        for name in ("eval.top_p", "eval.top_k")
    ),
    _unused(
        "train.eval_every",
        "data.eval",
        lambda c: c.data.eval is None,
        "name held-out prompts in data.eval",
    ),
    Rule(
        "error",
        ("train.keep_best_by", "data.eval"),
        lambda c: c.train.keep_best_by is not None and c.data.eval is None,
        "no checkpoint is evaluated, so that none is the best: name held-out prompts in data.eval, "
        "or leave train.keep_best_by out",
    ),
    Rule(
        "warning",
        ("train.keep_best_by", "train.eval_every"),
        lambda c: c.train.keep_best_by is not None and c.train.eval_every == 0,
        "the only checkpoint that is evaluated is the last: set train.eval_every",
    ),
    # data
    _unused(
        "data.prompt_column",
        "data.format",
        lambda c: c.data.format == "chat",
        "use data.messages_column",
    ),
    _unused(
        "data.messages_column",
        "data.format",
        lambda c: c.data.format == "text",
        "use data.prompt_column",
    ),
)
