"""Combinations of settings that are refused or warned about, as one table. A rule needs the config
alone; `umbra.trainer.services.setup_check` checks files and the number of ranks.

The config, `umbra doctor`, the start of a run and docs/configuration.md read the table.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Final, Literal

from umbra.runtime.engine_api.engine_names import engine_kind
from umbra.runtime.engine_api.lora import is_of_experts
from umbra.runtime.settings import annotations_of
from umbra.trainer.config.algorithm_names import (
    GROUP_ADVANTAGES,
    LOSSES,
    TOKEN_ADVANTAGES,
    takes_args,
)
from umbra.trainer.config.sft_config import RL_ONLY, SftConfig
from umbra.trainer.config.trainer_config import CriticSection, TrainerConfig

_NAME: Final = re.compile(r"\b(?:[a-z]+(?:\.[a-z_]+)+|critic)\b")


def _truncates_logprobs(engine: str) -> bool:
    return engine_kind(engine).truncates_logprobs


def _min_temperature(engine: str) -> float:
    return engine_kind(engine).min_temperature


def _max_lora_rank(engine: str) -> int:
    return engine_kind(engine).max_lora_rank


_NAMES: Final = {
    "GROUP_ADVANTAGES": GROUP_ADVANTAGES,
    "LOSSES": LOSSES,
    "is_of_experts": is_of_experts,
    "NO_CRITIC": CriticSection(),
    "max_lora_rank": _max_lora_rank,
    "min_temperature": _min_temperature,
    "takes_args": takes_args,
    "TOKEN_ADVANTAGES": TOKEN_ADVANTAGES,
    "truncates_logprobs": _truncates_logprobs,
}
"""Names that conditions use besides the sections of a config."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One combination of settings.

    Attributes:
        severity: "error" where nothing sensible can be meant; "warning" where the run works.
        condition: a Python expression over the config's sections, true for the combination.
        text: what the combination does, and the remedy.
    """

    severity: Literal["error", "warning"]
    condition: str
    text: str

    @property
    def settings(self) -> list[str]:
        """Full names, in the order of the condition."""
        return list(dict.fromkeys(_NAME.findall(self.condition)))

    def applies(self, config: TrainerConfig | SftConfig) -> bool:
        sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        return bool(eval(self.condition, {**_NAMES, **sections}))

    def message(self, config: TrainerConfig | SftConfig) -> str:
        """The values of the settings, and `text`."""
        given = [f"{name} = {_shown(attrgetter(name)(config))}" for name in self.settings]
        return f"{' and '.join(given)}: {self.text}"


def _shown(value: object) -> str:
    if isinstance(value, CriticSection):
        given, default = map(dataclasses.asdict, (value, CriticSection()))
        changed = [
            f"{name} = {_shown(given[name])}" for name in given if given[name] != default[name]
        ]
        return f"{{{', '.join(changed)}}}"
    return repr(str(value) if isinstance(value, Path) else value)


def refusals(config: TrainerConfig | SftConfig) -> list[Rule]:
    return [rule for rule in _rules(config) if rule.severity == "error" and rule.applies(config)]


def warnings(config: TrainerConfig | SftConfig) -> list[str]:
    """Combinations that work and are probably not meant, with the remedy."""
    found = [rule for rule in _rules(config) if rule.severity == "warning" and rule.applies(config)]
    return [rule.message(config) for rule in found]


def _rules(config: TrainerConfig | SftConfig) -> tuple[Rule, ...]:
    return SFT_RULES if isinstance(config, SftConfig) else RULES


def _refused(condition: str, text: str) -> Rule:
    return Rule("error", condition, text)


def _warned(condition: str, text: str) -> Rule:
    return Rule("warning", condition, text)


def _unused(condition: str, remedy: str, *names: str) -> Iterator[Rule]:
    """Warns about settings that differ from their defaults and are not used."""
    for name in names:
        *sections, key = name.split(".")
        section: type = TrainerConfig
        for each in sections:
            section = annotations_of(section)[each]
        fields = dataclasses.fields(section)
        default = next(field.default for field in fields if field.name == key)
        text = f"{name} has no effect: {remedy}, or leave {name} out"
        yield Rule("warning", f"{name} != {default!r} and {condition}", text)


_ADAPTERS_ALONE: Final = "model.lora.rank > 0 and not model.lora.merge"
_NO_EMBEDDINGS: Final = (
    "model.lora.rank > 0 and not {'embed_tokens', 'lm_head'}.intersection(model.lora.targets)"
)
_OPTIMIZATION: Final = (
    _refused(
        "any(map(is_of_experts, model.lora.targets)) and model.lora.rank % 8 > 0",
        "the product of many experts at once needs a rank that is a multiple of 8: use one",
    ),
    _warned(
        "train.ema > 0 and train.steps is not None "
        "and (1 - train.ema) * train.steps * train.mini_batches * train.updates_per_batch < 1",
        "the average is over more optimizer steps than the run has, and most of it stays with the "
        "starting weights: use a smaller train.ema",
    ),
    *_unused(
        "model.lora.rank == 0",
        "set model.lora.rank above 0",
        "model.lora.alpha",
        "model.lora.targets",
        "model.lora.rslora",
        "model.lora.merge",
    ),
    _refused(
        "(train.steps is None) == (train.epochs is None)",
        "the length of a run is given by one of the two: set it, and leave the other out",
    ),
    _refused(
        "train.warmup_steps > 0 and train.warmup_ratio > 0",
        "the warm-up is given by one of the two: leave the other out",
    ),
    _warned(
        "train.warmup_steps > 0 and train.steps is not None and train.warmup_steps >= train.steps",
        "the learning rate rises until the run ends: use fewer steps of warm-up",
    ),
    *_unused(
        "train.schedule == 'constant'",
        "use train.schedule = 'linear' or 'cosine'",
        "train.min_lr_ratio",
    ),
    *_unused(
        "model.lora.rank > 0",  # adapters are matrices
        "set model.lora.rank to 0",
        "train.vector_lr_ratio",
        "train.vector_weight_decay",
    ),
    *_unused(
        _NO_EMBEDDINGS,
        "name embed_tokens or lm_head in model.lora.targets",
        "train.embedding_lr_ratio",
        "train.embedding_weight_decay",
    ),
    *_unused(
        # Nothing is left for AdamW but a critic's head.
        f"train.optimizer == 'muon' and train.advantage != 'gae' and {_NO_EMBEDDINGS}",
        "use train.optimizer = 'adamw'",
        "train.betas",
        "train.eps",
    ),
    _warned(
        # Most weights of a language model are about 0.02, with which they are initialised.
        "model.master_dtype == 'bfloat16' and train.learning_rate < 0.02 / 512",
        "bfloat16 rounds a change below 1/512 of a weight to nothing, so that most weights stay as "
        "they are: use model.master_dtype = 'float32'",
    ),
    *_unused(
        "train.micro_batches > 0",
        "set train.micro_batches to 0",
        "train.max_tokens_per_micro_batch",
    ),
)
_DATA: Final = (
    *_unused("data.format == 'chat'", "use data.messages_column", "data.prompt_column"),
    *_unused("data.format == 'text'", "use data.prompt_column", "data.messages_column"),
)

RULES: Final = (
    # rollouts
    _refused(
        "rollout.temperature == 0",
        "greedy completions of a prompt are all the same: set it above 0",
    ),
    _refused(
        "rollout.top_k == 1",
        "only the most probable token is left, and completions of a prompt are all the same: use 0 "
        "for all tokens",
    ),
    _refused(
        "0 < min(rollout.temperature, eval.temperature or 1) < min_temperature(pool.engine)",
        "the engine cannot sample so close to 0: use 0.01 or more",
    ),
    _refused(
        "not truncates_logprobs(pool.engine) and (rollout.top_p < 1 or rollout.top_k > 0)",
        "this engine samples from a part of the distribution and reports the logprobs of all of "
        "it: use pool.engine = 'vllm', or leave rollout.top_p and rollout.top_k out",
    ),
    _warned(
        "(rollout.top_p < 1 or rollout.top_k > 0) and "
        "(rollout.max_staleness > 0 or train.updates_per_batch > 1 or train.mini_batches > 1)",
        "the trainer scores tokens among those that its own weights keep, and after an update "
        "these are not quite the ones that were sampled from: leave rollout.top_p and "
        "rollout.top_k out, or use the defaults of the others",
    ),
    _refused(
        "rollout.group_size == 1 and rollout.drop_zero_variance_groups",
        "every group would be dropped, because a single completion has one reward: set one of the "
        "two differently",
    ),
    _refused(
        "rollout.group_size < 2 and train.advantage in GROUP_ADVANTAGES",
        "advantages compare the completions of one prompt; that of a single one is always 0: "
        "set rollout.group_size to 2 or more, or use train.advantage = "
        "'gae', or 'reinforce' with train.advantage_norm = 'batch'",
    ),
    _warned(
        "rollout.max_staleness > 0 and pool.mode == 'hybrid'",
        "engines pause while the trainer works, so little is generated ahead: use pool.mode = "
        "'standalone', or rollout.max_staleness = 0",
    ),
    _warned(
        "rollout.max_staleness > 0 and train.loss == 'clipped'",
        "tokens of older weights may be clipped before the first update: use train.loss = "
        "'decoupled'",
    ),
    *_unused(
        "rollout.agent is None",
        "set rollout.agent",
        "rollout.agent_concurrency",
        "rollout.agent_retries",
    ),
    _refused(
        "reward.function is not None and bool(reward.functions)",
        "set reward.function, or reward.functions for several",
    ),
    _refused(
        "reward.function is None and not reward.functions and train.advantage != 'none'",
        "set reward.function, or reward.functions for several; training by a teacher alone needs "
        "none, with train.advantage = 'none'",
    ),
    _refused(
        "reward.function is None and not reward.functions "
        "and (data.eval is not None or bool(eval.sets))",
        "held-out completions would all get a reward of 0: set reward.function, or leave data.eval "
        "out",
    ),
    _refused(
        "reward.overlong_buffer > rollout.max_new_tokens",
        "the penalty would begin before the first token: use at most rollout.max_new_tokens",
    ),
    _warned(
        "reward.overlong_buffer > 0 and train.mask_truncated",
        "completions with the whole penalty are not trained on: leave one of the two out",
    ),
    *_unused(
        "reward.overlong_buffer == 0",
        "set reward.overlong_buffer above 0",
        "reward.overlong_penalty",
    ),
    # the loss
    _refused(
        "train.loss == 'gspo' and (train.kl_in_reward or train.teacher_kl_coef > 0 "
        "or train.advantage in TOKEN_ADVANTAGES)",
        "GSPO gives all tokens of a completion one advantage, and one of these is a token's: use "
        "another train.loss, or leave it out",
    ),
    _warned(
        "train.loss == 'gspo' and train.loss_aggregation != 'sequence'",
        "GSPO gives every sample the same weight: use train.loss_aggregation = 'sequence'",
    ),
    _warned(
        # GSPO's authors clip below 0.001.
        "train.loss == 'gspo' and max(train.clip_eps_low, train.clip_eps_high) > 0.01",
        "the ratio of a whole sample stays so close to 1 that nothing is clipped: use "
        "train.clip_eps_low = 3e-4 and train.clip_eps_high = 4e-4",
    ),
    _warned(
        "train.clip_eps_low == train.clip_eps_high == 0 and train.loss in LOSSES "
        "and train.loss not in ('cispo', 'sapo')",
        "any difference between the engines' logprobs and the trainer's clips a token: set both "
        "above 0, such as 0.2",
    ),
    *_unused(
        "train.loss in LOSSES and train.loss != 'decoupled'",
        "use train.loss = 'decoupled'",
        "train.importance_level",
        "train.importance_cap",
        "train.importance_above_cap",
        "train.importance_floor",
    ),
    *_unused(
        "train.importance_level == 'none'",
        "use another train.importance_level",
        "train.importance_cap",
        "train.importance_above_cap",
        "train.importance_floor",
    ),
    *_unused(
        "train.loss == 'sapo'",
        "use another train.loss",
        "train.clip_eps_low",
        "train.clip_eps_high",
    ),
    _warned(
        "rollout.drop_zero_variance_groups and train.advantage in ('gae', 'reinforce')",
        "without the group's mean, groups of equal rewards teach, too: leave one of the two out",
    ),
    _warned(
        "train.advantage == 'reinforce' and train.advantage_norm == 'none'",
        "nothing is compared with anything, so that rewards of 0 and 1 can only raise "
        "probabilities: use train.advantage_norm = 'batch'",
    ),
    _refused(
        "train.advantage == 'gdpo' and len(reward.functions) + (reward.overlong_buffer > 0) < 2",
        "GDPO normalizes several rewards apart: name them in reward.functions, or use "
        "train.advantage = 'grpo'",
    ),
    _warned(
        "train.advantage == 'gdpo' and train.advantage_norm == 'none'",
        "the size of the sum of normalized rewards grows with their number: use "
        "train.advantage_norm = 'batch', as the paper does",
    ),
    _refused(
        "0 < train.dual_clip <= 1",
        "it bounds ratios, which are 1 where nothing has changed: use a number above 1, such as 3, "
        "or 0 for no bound",
    ),
    *_unused(
        "train.loss in ('cispo', 'sapo', 'dppo')",
        "use train.loss = 'clipped', 'decoupled' or 'gspo'",
        "train.dual_clip",
    ),
    _refused(
        "train.loss in LOSSES and not takes_args(train.loss, train.loss_args)",
        "of umbra's losses only 'sapo' takes arguments, numbers above 0 by the names tau_positive "
        "and tau_negative",
    ),
    *_unused(
        "train.kl_coef == 0",
        "set train.kl_coef above 0",
        "train.kl_in_reward",
        "train.reference_every",
        "train.kl_estimator",
    ),
    _warned(
        "train.kl_in_reward and train.kl_estimator != 'k3'",
        "in the reward the estimator is k1, and the setting changes only what "
        "train/reference_kl logs: leave train.kl_estimator out",
    ),
    # the critic
    _refused(
        "train.advantage != 'gae' and critic != NO_CRITIC",
        "nothing would train a critic: use train.advantage = 'gae', or leave [critic] out",
    ),
    _refused(
        "critic.path is not None and model.lora.rank > 0",
        "the adapters of a checkpoint belong to one base model, which is the policy's: leave "
        "critic.path out",
    ),
    _refused(
        "train.advantage == 'gae' and {*model.lora.targets} == {'lm_head'}",
        "a critic has another head, and would get no adapters: name more layers",
    ),
    _refused(
        "train.steps is not None and critic.warmup_steps >= train.steps",
        "the policy would never be trained: use fewer steps of warm-up than the run has",
    ),
    _warned(
        "train.steps is not None "
        "and 0 < train.steps - critic.warmup_steps <= train.warmup_steps < train.steps",
        "the policy's warm-up begins after the critic's, and its learning rate rises until the run "
        "ends: use fewer steps of either",
    ),
    # LoRA
    _refused(
        "model.lora.rank > max_lora_rank(pool.engine) and not model.lora.merge",
        "this engine cannot load adapters of that rank from a sync: 'embedded' and 'sglang' load "
        "any, 'vllm' up to 512, and 'echo' none: leave model.lora.merge at true",
    ),
    _refused(
        f"{_ADAPTERS_ALONE} and any(map(is_of_experts, model.lora.targets)) "
        "and pool.engine != 'vllm'",
        "only vLLM loads adapters of experts from a sync: leave model.lora.merge at true",
    ),
    _refused(
        f"{_ADAPTERS_ALONE} and {{'embed_tokens', 'lm_head'}}.intersection(model.lora.targets) "
        "and pool.engine == 'sglang' and 'lora_target_modules' not in pool.engine_args",
        "SGLang makes room for adapters of linear layers in decoder blocks alone: leave "
        "model.lora.merge at true, or name all targets in pool.engine_args.lora_target_modules",
    ),
    _refused(
        "model.lora.rank > 0 and train.reference_every > 0",
        "the reference model is the one without adapters, and no second one is kept: leave "
        "train.reference_every out",
    ),
    _refused(
        f"{_ADAPTERS_ALONE} and bool(pool.lora_adapters)",
        "a request has one adapter, which is the trained one: leave model.lora.merge at true, or "
        "pool.lora_adapters out",
    ),
    _warned(
        f"{_ADAPTERS_ALONE} and pool.staged_updates",
        "adapters are small, and are loaded at once: leave pool.staged_updates out",
    ),
    # the teacher
    _refused(
        "train.teacher_kl_coef > 0 and 'teacher' not in pools and not data.teacher_template",
        "there is no teacher: add a section [pools.teacher] with its model_path, or set "
        "data.teacher_template to let the policy teach itself",
    ),
    *_unused(
        "train.teacher_kl_coef == 0", "set train.teacher_kl_coef above 0", "data.teacher_template"
    ),
    _refused(
        "data.teacher_template != '' and rollout.agent is not None",
        "agent loops make prompts of their own: leave one of both out",
    ),
    _refused(
        "'{successful_completion}' in data.teacher_template "
        "and (rollout.group_size == 1 or not (reward.function or reward.functions))",
        "rewards of other completions decide: set rollout.group_size above 1 and reward.function",
    ),
    _warned(
        "train.teacher_kl_coef == 0 and 'teacher' in pools",
        "the pool named teacher is called by your own code alone: set train.teacher_kl_coef above "
        "0, such as 1, to learn from it",
    ),
    _refused(
        "train.advantage == 'none' and train.teacher_kl_coef == 0",
        "nothing would be learned: set train.teacher_kl_coef above 0, or use another "
        "train.advantage",
    ),
    _refused(
        "train.advantage == 'none' and rollout.drop_zero_variance_groups",
        "rewards teach nothing here, so that equal ones are no reason to drop a group: leave "
        "rollout.drop_zero_variance_groups out",
    ),
    _warned(
        "train.teacher_kl_coef > 0 and train.advantage != 'none' "
        "and rollout.drop_zero_variance_groups",
        "the teacher has answered for groups of equal rewards, too, and its answers are dropped "
        "with them: leave rollout.drop_zero_variance_groups out",
    ),
    *_unused(
        "train.advantage == 'none'",
        "use another train.advantage",
        "train.advantage_norm",
    ),
    _refused(
        "train.teacher_kl_coef > 0 "
        "and (rollout.temperature != 1 or rollout.top_p < 1 or rollout.top_k > 0)",
        "a teacher's logprobs are of its whole distribution at temperature 1, and the policy's are "
        "of the one that it samples from: use rollout.temperature = 1, and leave rollout.top_p and "
        "rollout.top_k out",
    ),
    # the optimizer
    _refused(
        "rollout.groups_per_step % train.mini_batches != 0",
        "each optimizer step takes as many prompts: use a divisor of rollout.groups_per_step",
    ),
    *_OPTIMIZATION,
    _refused(
        "train.offload != 'none' and pool.mode != 'hybrid'",
        "engines of a standalone pool do not share the trainer's memory: set train.offload to "
        "'none', or pool.mode to 'hybrid'",
    ),
    # evaluations
    _refused(
        "train.eval_beside and train.keep_best_by is not None",
        "the best checkpoint is chosen by its own weights, and engines may have got later ones "
        "before an evaluation ends: leave one of the two out",
    ),
    _refused(
        "train.eval_beside and pool.mode != 'standalone'",
        "hybrid engines pause while the trainer computes: set pool.mode to 'standalone', or "
        "train.eval_beside to false",
    ),
    *_unused(
        "data.eval is None and not eval.sets",
        "name held-out prompts in data.eval",
        "eval.samples",
        "eval.temperature",
        "eval.top_p",
        "eval.top_k",
        "eval.max_new_tokens",
        "data.eval_limit",
    ),
    *_unused("eval.temperature == 0", "set eval.temperature above 0", "eval.top_p", "eval.top_k"),
    _refused(
        "eval.samples > 1 and eval.temperature == 0",
        "greedy completions of a prompt are all the same: set eval.temperature above 0, or "
        "eval.samples to 1",
    ),
    _refused(
        "data.eval is not None and 'eval' in eval.sets",
        "this is what the set of data.eval is called: rename the other one",
    ),
    *_unused(
        "data.eval is None",
        "name held-out prompts in data.eval",
        "train.eval_every",
        "train.eval_beside",
    ),
    _refused(
        "train.keep_best_by is not None and data.eval is None",
        "no checkpoint is evaluated, so that none is the best: name held-out prompts in data.eval, "
        "or leave train.keep_best_by out",
    ),
    _warned(
        "train.keep_best_by is not None and train.eval_every == 0",
        "the only checkpoint that is evaluated is the last: set train.eval_every",
    ),
    # data
    _refused(
        "data.overlong == 'truncate'",
        "a prompt without its end asks for something else: use 'drop'",
    ),
    *_DATA,
)


def _rl_only() -> Iterator[Rule]:
    """Refuses settings of the shared sections that SFT does not use."""
    for section, names in RL_ONLY.items():
        for field in dataclasses.fields(annotations_of(SftConfig)[section]):
            if field.name in names:
                factory = field.default_factory
                default = field.default if factory is dataclasses.MISSING else factory()
                text = f"only RL training has a use for {section}.{field.name}: leave it out"
                yield Rule("error", f"{section}.{field.name} != {default!r}", text)


SFT_RULES: Final = (
    *_rl_only(),
    *_OPTIMIZATION,
    *_unused(
        "data.eval is None",
        "name held-out rows in data.eval",
        "train.eval_every",
        "data.eval_limit",
    ),
    *_DATA,
)
"""The rules of `SftConfig`."""
