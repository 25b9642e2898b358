"""Combinations of settings that are refused, and those that are warned about."""

from __future__ import annotations

import pytest
from minimal_config import config_with

from umbra.runtime.errors import ConfigError
from umbra.trainer.config.setting_rules import RULES, warnings


def cases(text: str) -> list[tuple[str, list[str]]]:
    """Overrides, and the settings that the message about them names, in its order."""
    lines = (line.split(" -> ") for line in text.strip().splitlines())
    return [(overrides.strip(), names.split()) for overrides, names in lines]


def named_in(message: str) -> list[str]:
    """The settings that a message begins with: `a = 1 and b = 'c': this is why`."""
    return [part.split(" = ")[0] for part in message.partition(": ")[0].split(" and ")]


REFUSED = cases("""
rollout.temperature=0.0 -> rollout.temperature
rollout.top_k=1 -> rollout.top_k
pool.engine=vllm rollout.temperature=0.009 -> rollout.temperature eval.temperature pool.engine
rollout.temperature=0.00001 -> rollout.temperature eval.temperature pool.engine
pool.engine=vllm eval.temperature=0.009 -> rollout.temperature eval.temperature pool.engine
rollout.group_size=1 -> rollout.group_size train.advantage
rollout.group_size=1 rollout.drop_zero_variance_groups=true \
-> rollout.group_size rollout.drop_zero_variance_groups
reward.functions.exact=rewards:exact -> reward.function reward.functions
reward.overlong_buffer=257 rollout.max_new_tokens=256 \
-> reward.overlong_buffer rollout.max_new_tokens
eval.samples=2 -> eval.samples eval.temperature
train.offload=all pool.mode=standalone -> train.offload pool.mode
pool.engine=sglang rollout.top_p=0.9 -> pool.engine rollout.top_p rollout.top_k
pool.engine=sglang rollout.top_k=20 -> pool.engine rollout.top_p rollout.top_k
data.overlong=truncate -> data.overlong
train.epochs=2 -> train.steps train.epochs
train.steps= -> train.steps train.epochs
train.warmup_steps=1 train.warmup_ratio=0.1 -> train.warmup_steps train.warmup_ratio
train.mini_batches=3 -> rollout.groups_per_step train.mini_batches
train.advantage=gdpo -> train.advantage reward.functions reward.overlong_buffer
train.loss=gspo train.kl_in_reward=true \
-> train.loss train.kl_in_reward train.teacher_kl_coef train.advantage
train.dual_clip=0.9 -> train.dual_clip
train.teacher_kl_coef=1 -> train.teacher_kl_coef data.teacher_template
data.teacher_template={prompt} rollout.agent=loops:run -> data.teacher_template rollout.agent
train.advantage=none -> train.advantage train.teacher_kl_coef
model.lora.rank=513 pool.engine=vllm model.lora.merge=false \
-> model.lora.rank pool.engine model.lora.merge
model.lora.rank=1 pool.engine=echo model.lora.merge=false \
-> model.lora.rank pool.engine model.lora.merge
model.lora.rank=8 model.lora.targets=["experts"] pool.engine=sglang model.lora.merge=false \
-> model.lora.rank model.lora.merge model.lora.targets pool.engine
model.lora.rank=8 model.lora.targets=["lm_head"] pool.engine=sglang model.lora.merge=false \
-> model.lora.rank model.lora.merge model.lora.targets pool.engine pool.engine_args
model.lora.rank=8 train.reference_every=9 -> model.lora.rank train.reference_every
model.lora.rank=8 model.lora.merge=false pool.lora_adapters.a=b \
-> model.lora.rank model.lora.merge pool.lora_adapters
train.loss_args.tau=2 -> train.loss train.loss_args
train.loss=sapo train.loss_args.tau_positive=high -> train.loss train.loss_args
train.keep_best_by=reward -> train.keep_best_by data.eval
data.eval=e.jsonl eval.sets.eval=f.jsonl -> data.eval eval.sets
train.eval_beside=true -> train.eval_beside pool.mode
train.eval_beside=true train.keep_best_by=reward -> train.eval_beside train.keep_best_by
""")
QUESTIONABLE = cases("""
rollout.max_staleness=2 train.loss=decoupled -> rollout.max_staleness pool.mode
rollout.max_staleness=2 pool.mode=standalone -> rollout.max_staleness train.loss
rollout.top_p=0.9 rollout.max_staleness=1 pool.mode=standalone train.loss=decoupled \
-> rollout.top_p rollout.top_k rollout.max_staleness train.updates_per_batch train.mini_batches
rollout.top_k=9 train.updates_per_batch=2 \
-> rollout.top_p rollout.top_k rollout.max_staleness train.updates_per_batch train.mini_batches
rollout.agent_concurrency=8 -> rollout.agent_concurrency rollout.agent
rollout.agent_retries=0 -> rollout.agent_retries rollout.agent
reward.overlong_buffer=9 train.mask_truncated=true -> reward.overlong_buffer train.mask_truncated
reward.overlong_penalty=2.0 -> reward.overlong_penalty reward.overlong_buffer
train.loss=gspo train.clip_eps_low=3e-4 train.clip_eps_high=4e-4 \
-> train.loss train.loss_aggregation
train.loss=gspo train.loss_aggregation=sequence -> train.loss train.clip_eps_low train.clip_eps_high
train.clip_eps_low=0.0 train.clip_eps_high=0.0 -> train.clip_eps_low train.clip_eps_high train.loss
train.importance_cap=5.0 -> train.importance_cap train.loss
train.importance_above_cap=mask train.loss=cispo -> train.importance_above_cap train.loss
train.importance_floor=0.1 -> train.importance_floor train.loss
train.importance_level=none -> train.importance_level train.loss
train.loss=decoupled train.importance_level=none train.importance_cap=5.0 \
-> train.importance_cap train.importance_level
train.loss=decoupled train.importance_level=none train.importance_above_cap=mask \
-> train.importance_above_cap train.importance_level
train.loss=decoupled train.importance_level=none train.importance_floor=0.1 \
-> train.importance_floor train.importance_level
train.loss=sapo train.clip_eps_low=0.3 -> train.clip_eps_low train.loss
train.loss=sapo train.clip_eps_high=0.3 -> train.clip_eps_high train.loss
train.advantage=reinforce train.advantage_norm=batch rollout.drop_zero_variance_groups=true \
-> rollout.drop_zero_variance_groups train.advantage
train.advantage=reinforce -> train.advantage train.advantage_norm
reward.function= reward.functions.a=m:a reward.functions.b=m:b train.advantage=gdpo \
-> train.advantage train.advantage_norm
train.loss=sapo train.dual_clip=3.0 -> train.dual_clip train.loss
model.lora.alpha=16 -> model.lora.alpha model.lora.rank
model.lora.targets=["q_proj"] -> model.lora.targets model.lora.rank
model.lora.rank=8 model.lora.merge=false pool.mode=standalone \
pool.engine=vllm pool.staged_updates=true pool.transport=cuda_ipc \
-> model.lora.rank model.lora.merge pool.staged_updates
model.lora.merge=false -> model.lora.merge model.lora.rank
model.lora.rslora=true -> model.lora.rslora model.lora.rank
train.reference_every=9 -> train.reference_every train.kl_coef
data.teacher_template={prompt} -> data.teacher_template train.teacher_kl_coef
train.kl_estimator=k2 -> train.kl_estimator train.kl_coef
pools.teacher.model_path=models/large -> train.teacher_kl_coef
train.teacher_kl_coef=1 \
pools.teacher.model_path=models/large rollout.drop_zero_variance_groups=true \
-> train.teacher_kl_coef train.advantage rollout.drop_zero_variance_groups
train.teacher_kl_coef=1 pools.teacher.model_path=models/large \
train.advantage=none train.advantage_norm=batch -> train.advantage_norm train.advantage
train.kl_in_reward=true -> train.kl_in_reward train.kl_coef
train.kl_coef=0.1 train.kl_in_reward=true train.kl_estimator=k2 \
-> train.kl_in_reward train.kl_estimator
train.ema=0.999 -> train.ema train.steps train.mini_batches train.updates_per_batch
train.warmup_steps=10 -> train.warmup_steps train.steps
train.advantage=gae train.warmup_steps=6 critic.warmup_steps=4 \
-> train.steps critic.warmup_steps train.warmup_steps
train.min_lr_ratio=0.1 -> train.min_lr_ratio train.schedule
train.vector_lr_ratio=2 model.lora.rank=8 -> train.vector_lr_ratio model.lora.rank
train.vector_weight_decay=0.1 model.lora.rank=8 -> train.vector_weight_decay model.lora.rank
train.embedding_lr_ratio=2 model.lora.rank=8 \
-> train.embedding_lr_ratio model.lora.rank model.lora.targets
train.embedding_weight_decay=0 model.lora.rank=8 model.lora.targets=["q_proj"] \
-> train.embedding_weight_decay model.lora.rank model.lora.targets
train.optimizer=muon model.lora.rank=8 train.betas=[0.9,0.95] \
-> train.betas train.optimizer train.advantage model.lora.rank model.lora.targets
train.optimizer=muon model.lora.rank=8 train.eps=1e-6 \
-> train.eps train.optimizer train.advantage model.lora.rank model.lora.targets
model.master_dtype=bfloat16 -> model.master_dtype train.learning_rate
train.max_tokens_per_micro_batch=512 train.micro_batches=2 \
-> train.max_tokens_per_micro_batch train.micro_batches
eval.temperature=1.0 -> eval.temperature data.eval eval.sets
eval.samples=4 eval.temperature=1.0 -> eval.samples data.eval eval.sets
eval.top_p=0.9 -> eval.top_p data.eval eval.sets
eval.top_k=9 -> eval.top_k data.eval eval.sets
eval.top_p=0.9 data.eval=e.jsonl -> eval.top_p eval.temperature
eval.top_k=9 data.eval=e.jsonl -> eval.top_k eval.temperature
eval.max_new_tokens=9 -> eval.max_new_tokens data.eval eval.sets
data.eval_limit=9 -> data.eval_limit data.eval eval.sets
train.eval_every=5 -> train.eval_every data.eval
train.eval_beside=true pool.mode=standalone -> train.eval_beside data.eval
train.keep_best_by=reward data.eval=eval.jsonl -> train.keep_best_by train.eval_every
data.format=chat data.prompt_column=question -> data.prompt_column data.format
data.format=text data.messages_column=chat -> data.messages_column data.format
""")
MEANT = [
    'model.lora.rank=8 model.lora.targets=["lm_head"] train.embedding_lr_ratio=0.5',
    "train.embedding_weight_decay=0 train.vector_lr_ratio=2 train.vector_weight_decay=0.1",
    'model.lora.rank=512 pool.engine=vllm model.lora.alpha=8 model.lora.targets=["q_proj"] '
    "model.lora.merge=false",
    'model.lora.rank=8 model.lora.targets=["experts","lm_head"] pool.engine=sglang',
    "model.lora.rank=513 pool.engine=vllm pool.lora_adapters.a=b",
    "rollout.top_p=0.9 rollout.top_k=20 pool.engine=vllm",
    "pool.engine=sglang data.eval=e.jsonl eval.temperature=1.0 eval.top_p=0.9 eval.top_k=9",
    "rollout.max_staleness=2 pool.mode=standalone train.loss=decoupled train.importance_cap=5.0",
    "train.advantage=own:estimate rollout.group_size=1",
    "train.loss=own:loss train.importance_cap=5.0 train.loss_args.alpha=low",
    "train.loss=sapo train.loss_args.tau_positive=2",
    "train.advantage=reinforce train.advantage_norm=batch rollout.group_size=1",
    "train.mini_batches=4 train.dual_clip=3.0 train.kl_coef=0.1 train.reference_every=9",
    "train.loss=cispo train.clip_eps_low=0.0 train.clip_eps_high=0.0",
    "train.loss=gspo train.loss_aggregation=sequence train.clip_eps_low=3e-4 "
    "train.clip_eps_high=4e-4",
    "train.kl_coef=0.01 train.kl_estimator=k2",
    "train.schedule=cosine train.min_lr_ratio=0.1 train.warmup_steps=9",
    "model.master_dtype=bfloat16 train.learning_rate=1e-4",
    "train.offload=all",
    "train.steps= train.epochs=2 train.warmup_steps=100",
    "data.eval=eval.jsonl train.eval_every=5 train.keep_best_by=reward eval.max_new_tokens=9",
    "eval.samples=4 eval.temperature=1.0 eval.sets.easy=easy.jsonl",
    "data.eval=eval.jsonl data.eval_limit=9 train.eval_every=5",
    "data.eval=eval.jsonl train.eval_every=5 train.eval_beside=true pool.mode=standalone",
    "train.advantage=gae rollout.group_size=1 critic.path=other critic.warmup_steps=2 "
    "train.warmup_steps=7",
    "train.advantage=gae model.lora.rank=8 train.kl_coef=0.1 train.kl_in_reward=true",
    "train.advantage=gae model.lora.rank=8 train.optimizer=muon train.betas=[0.9,0.95] "
    "train.eps=1e-6",
    "train.teacher_kl_coef=0.1 pools.teacher.model_path=models/large",
    "train.teacher_kl_coef=0.1 data.teacher_template={prompt}{successful_completion}",
    "train.advantage=none train.teacher_kl_coef=1 pools.teacher.model_path=models/large "
    "reward.function= rollout.group_size=1",
]
TEACHER = "train.teacher_kl_coef=1 pools.teacher.model_path=models/large"
REFUSED_WITH_A_TEACHER = cases("""
reward.function= -> reward.function reward.functions train.advantage
train.advantage=none rollout.drop_zero_variance_groups=true \
-> train.advantage rollout.drop_zero_variance_groups
rollout.temperature=0.8 -> train.teacher_kl_coef rollout.temperature rollout.top_p rollout.top_k
train.loss=gspo -> train.loss train.kl_in_reward train.teacher_kl_coef train.advantage
train.advantage=none rollout.group_size=1 data.teacher_template={successful_completion} \
-> data.teacher_template rollout.group_size reward.function reward.functions
train.advantage=none reward.function= data.eval=eval.jsonl \
-> reward.function reward.functions data.eval eval.sets
""")
REFUSED_WITH_A_CRITIC = cases("""
train.advantage=rloo -> train.advantage critic
train.advantage=gae train.loss=gspo \
-> train.loss train.kl_in_reward train.teacher_kl_coef train.advantage
train.advantage=gae critic.path=other model.lora.rank=8 -> critic.path model.lora.rank
train.advantage=gae model.lora.rank=8 model.lora.targets=["lm_head"] \
-> train.advantage model.lora.targets
train.advantage=gae critic.warmup_steps=10 -> train.steps critic.warmup_steps
""")
WITH_OTHERS = (*REFUSED_WITH_A_TEACHER, *REFUSED_WITH_A_CRITIC)


@pytest.mark.parametrize(("overrides", "names"), REFUSED)
def test_a_combination_without_a_sensible_meaning_is_refused(
    overrides: str, names: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        config_with(overrides)

    source, _, message = str(raised.value).partition(" (command line): ")
    assert (source, named_in(message)) == (overrides, names)


@pytest.mark.parametrize(
    ("given", "overrides", "names"),
    [
        *((TEACHER, *case) for case in REFUSED_WITH_A_TEACHER),
        *(("critic.lam=0.95", *case) for case in REFUSED_WITH_A_CRITIC),
    ],
)
def test_a_combination_that_no_teacher_or_critic_makes_sense_of_is_refused(
    given: str, overrides: str, names: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        config_with(f"{given} {overrides}")

    assert f": {names[0]} = " in str(raised.value)
    assert named_in(str(raised.value)[str(raised.value).index(f"{names[0]} = ") :]) == names


@pytest.mark.parametrize(("overrides", "names"), QUESTIONABLE)
def test_a_combination_that_is_probably_not_meant_is_warned_about(
    overrides: str, names: list[str]
) -> None:
    found = warnings(config_with(overrides))

    assert names in [named_in(text) for text in found]


@pytest.mark.parametrize("overrides", ["", *MEANT])
def test_sensible_combinations_pass_in_silence(overrides: str) -> None:
    assert warnings(config_with(overrides)) == []


def test_every_rule_has_a_case() -> None:
    proved = [names for _, names in (*REFUSED, *WITH_OTHERS, *QUESTIONABLE)]

    assert [rule.settings for rule in RULES if list(rule.settings) not in proved] == []


def test_a_message_has_the_values_and_no_teacher_is_named_as_the_remedy() -> None:
    said = r"train\.loss = 'clipped' and train\.loss_args = \{'tau': 2\}: "
    with pytest.raises(ConfigError, match=said):
        config_with("train.loss_args.tau=2")
    said = r"train\.teacher_kl_coef = 1\.0 and .* = '': there is no teacher: add a section "
    with pytest.raises(ConfigError, match=said):
        config_with("train.teacher_kl_coef=1")


def test_settings_of_a_critic_that_nothing_would_train_are_named() -> None:
    said = r"^critic\.path=a critic\.lam=0\.9 .* and critic = \{path = 'a', lam = 0\.9\}: nothing "
    with pytest.raises(ConfigError, match=said):
        config_with("critic.path=a critic.lam=0.9")


def test_all_refusals_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.temperature = 0\.0.*\n.*train\.offload = "):
        config_with("rollout.temperature=0.0 train.offload=all pool.mode=standalone")


def test_k1_is_no_estimator_of_a_loss() -> None:
    with pytest.raises(ConfigError, match=r"kl_estimator=k1 .*: input should be 'k2' or 'k3'"):
        config_with("train.kl_coef=0.1 train.kl_estimator=k1")
