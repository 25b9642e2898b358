"""Combinations of settings that are refused, and those that are warned about."""

from __future__ import annotations

import pytest
from minimal_config import config_with

from umbra.runtime.errors import ConfigError
from umbra.trainer.config.setting_rules import RULES, warnings

REFUSED = [
    ("rollout.temperature=0.0", "rollout.temperature = 0.0: "),
    ("rollout.group_size=1", "rollout.group_size = 1 and train.advantage = 'grpo': "),
    (
        "rollout.group_size=1 rollout.drop_zero_variance_groups=true",
        "rollout.group_size = 1 and rollout.drop_zero_variance_groups = True: ",
    ),
    (
        "reward.functions.exact=rewards:exact",
        "reward.function = 'rewards:score' and reward.functions = {'exact': 'rewards:exact'}: ",
    ),
    (
        "reward.overlong_buffer=257 rollout.max_new_tokens=256",
        "reward.overlong_buffer = 257 and rollout.max_new_tokens = 256: ",
    ),
    ("eval.samples=2", "eval.samples = 2 and eval.temperature = 0.0: "),
    (
        "train.offload=all pool.mode=standalone",
        "train.offload = 'all' and pool.mode = 'standalone': ",
    ),
    (
        "pool.engine=sglang rollout.top_p=0.9",
        "pool.engine = 'sglang' and rollout.top_p = 0.9 and rollout.top_k = 0: ",
    ),
    (
        "pool.engine=sglang rollout.top_k=20",
        "pool.engine = 'sglang' and rollout.top_p = 1.0 and rollout.top_k = 20: ",
    ),
    ("data.overlong=truncate", "data.overlong = 'truncate': "),
    ("train.epochs=2", "train.steps = 10 and train.epochs = 2.0: "),
    (
        "train.warmup_steps=1 train.warmup_ratio=0.1",
        "train.warmup_steps = 1 and train.warmup_ratio = 0.1: ",
    ),
    ("train.mini_batches=3", "rollout.groups_per_step = 32 and train.mini_batches = 3: "),
    (
        "train.advantage=gdpo",
        "train.advantage = 'gdpo' and reward.functions = {} and reward.overlong_buffer = 0: ",
    ),
    (
        "train.loss=gspo train.kl_in_reward=true",
        "train.loss = 'gspo' and train.kl_in_reward = True: ",
    ),
    ("train.dual_clip=0.9", "train.dual_clip = 0.9: "),
    ("train.teacher_kl_coef=1", "train.teacher_kl_coef = 1.0: there is no teacher: add a section "),
    (
        "train.advantage=none",
        "train.advantage = 'none' and train.teacher_kl_coef = 0.0: nothing would be learned",
    ),
    (
        "model.lora.rank=513 pool.engine=vllm",
        "model.lora.rank = 513 and pool.engine = 'vllm': ",
    ),
    ("model.lora.rank=1 pool.engine=echo", "model.lora.rank = 1 and pool.engine = 'echo': "),
    (
        "model.lora.rank=8 train.reference_every=9",
        "model.lora.rank = 8 and train.reference_every = 9: ",
    ),
    (
        "model.lora.rank=8 pool.lora_adapters.a=b",
        "model.lora.rank = 8 and pool.lora_adapters = {'a': ",
    ),
    (
        "train.loss_args.tau=2",
        "train.loss = 'clipped' and train.loss_args = {'tau': 2}: ",
    ),
    (
        "train.loss=sapo train.loss_args.tau_positive=high",
        "train.loss = 'sapo' and train.loss_args = {'tau_positive': 'high'}: ",
    ),
    ("train.keep_best_by=reward", "train.keep_best_by = 'reward' and data.eval = None: "),
]
QUESTIONABLE = [
    (
        "rollout.max_staleness=2 train.loss=decoupled",
        "rollout.max_staleness = 2 and pool.mode = 'hybrid': ",
    ),
    (
        "rollout.max_staleness=2 pool.mode=standalone",
        "rollout.max_staleness = 2 and train.loss = 'clipped': ",
    ),
    (
        "rollout.top_p=0.9 rollout.max_staleness=1 pool.mode=standalone train.loss=decoupled",
        "rollout.top_p = 0.9 and rollout.top_k = 0 and rollout.max_staleness = 1 and "
        "train.updates_per_batch = 1 and train.mini_batches = 1: ",
    ),
    (
        "rollout.top_k=9 train.updates_per_batch=2",
        "rollout.top_p = 1.0 and rollout.top_k = 9 and rollout.max_staleness = 0 and "
        "train.updates_per_batch = 2 and train.mini_batches = 1: ",
    ),
    ("rollout.agent_concurrency=8", "rollout.agent_concurrency = 8 and rollout.agent = None: "),
    ("rollout.agent_retries=0", "rollout.agent_retries = 0 and rollout.agent = None: "),
    (
        "reward.overlong_buffer=9 train.mask_truncated=true",
        "reward.overlong_buffer = 9 and train.mask_truncated = True: ",
    ),
    (
        "reward.overlong_penalty=2.0",
        "reward.overlong_penalty = 2.0 and reward.overlong_buffer = 0: ",
    ),
    (
        "train.loss=gspo train.clip_eps_low=3e-4 train.clip_eps_high=4e-4",
        "train.loss = 'gspo' and train.loss_aggregation = 'token': ",
    ),
    (
        "train.loss=gspo train.loss_aggregation=sequence",
        "train.loss = 'gspo' and train.clip_eps_low = 0.2 and train.clip_eps_high = 0.2: ",
    ),
    (
        "train.clip_eps_low=0.0 train.clip_eps_high=0.0",
        "train.clip_eps_low = 0.0 and train.clip_eps_high = 0.0 and train.loss = 'clipped': ",
    ),
    ("train.importance_cap=5.0", "train.importance_cap = 5.0 and train.loss = 'clipped': "),
    (
        "train.importance_above_cap=mask train.loss=cispo",
        "train.importance_above_cap = 'mask' and train.loss = 'cispo': ",
    ),
    ("train.importance_floor=0.1", "train.importance_floor = 0.1 and train.loss = 'clipped': "),
    ("train.importance_level=none", "train.importance_level = 'none' and train.loss = 'clipped': "),
    *(
        (
            f"train.loss=decoupled train.importance_level=none train.{name}={value}",
            f"train.{name} = {shown} and train.importance_level = 'none': ",
        )
        for name, value, shown in (
            ("importance_cap", "5.0", "5.0"),
            ("importance_above_cap", "mask", "'mask'"),
            ("importance_floor", "0.1", "0.1"),
        )
    ),
    *(
        (
            f"train.loss=sapo train.clip_eps_{end}=0.3",
            f"train.clip_eps_{end} = 0.3 and train.loss = 'sapo': ",
        )
        for end in ("low", "high")
    ),
    (
        "train.advantage=reinforce train.advantage_norm=batch "
        "rollout.drop_zero_variance_groups=true",
        "rollout.drop_zero_variance_groups = True and train.advantage = 'reinforce': ",
    ),
    (
        "train.advantage=reinforce",
        "train.advantage = 'reinforce' and train.advantage_norm = 'none': ",
    ),
    (
        "reward.function= reward.functions.a=m:a reward.functions.b=m:b train.advantage=gdpo",
        "train.advantage = 'gdpo' and train.advantage_norm = 'none': ",
    ),
    ("train.loss=sapo train.dual_clip=3.0", "train.dual_clip = 3.0 and train.loss = 'sapo': "),
    ("model.lora.alpha=16", "model.lora.alpha = 16.0 and model.lora.rank = 0: "),
    (
        'model.lora.targets=["q_proj"]',
        "model.lora.targets = ('q_proj',) and model.lora.rank = 0: ",
    ),
    (
        "model.lora.rank=8 pool.mode=standalone pool.engine=vllm pool.staged_updates=true "
        "pool.transport=cuda_ipc",
        "model.lora.rank = 8 and pool.staged_updates = True: ",
    ),
    ("model.lora.rslora=true", "model.lora.rslora = True and model.lora.rank = 0: "),
    ("train.reference_every=9", "train.reference_every = 9 and train.kl_coef = 0.0: "),
    ("train.kl_estimator=k2", "train.kl_estimator = 'k2' and train.kl_coef = 0.0: "),
    (
        "pools.teacher.model_path=models/large",
        "train.teacher_kl_coef = 0.0: the pool named teacher is called by your own code alone",
    ),
    (
        "train.teacher_kl_coef=1 pools.teacher.model_path=models/large "
        "rollout.drop_zero_variance_groups=true",
        "train.teacher_kl_coef = 1.0 and train.advantage = 'grpo' and "
        "rollout.drop_zero_variance_groups = True: ",
    ),
    (
        "train.teacher_kl_coef=1 pools.teacher.model_path=models/large train.advantage=none "
        "train.advantage_norm=batch",
        "train.advantage = 'none' and train.advantage_norm = 'batch': ",
    ),
    ("train.kl_in_reward=true", "train.kl_in_reward = True and train.kl_coef = 0.0: "),
    (
        "train.kl_coef=0.1 train.kl_in_reward=true train.kl_estimator=k2",
        "train.kl_in_reward = True and train.kl_estimator = 'k2': ",
    ),
    (
        "train.ema=0.999",
        "train.ema = 0.999 and train.steps = 10 and train.mini_batches = 1 and "
        "train.updates_per_batch = 1: ",
    ),
    ("train.skip_nonfinite=10", "train.skip_nonfinite = 10 and train.steps = 10: "),
    ("train.warmup_steps=10", "train.warmup_steps = 10 and train.steps = 10: "),
    ("train.min_lr_ratio=0.1", "train.min_lr_ratio = 0.1 and train.schedule = 'constant': "),
    (
        "train.optimizer=muon model.lora.rank=8 train.betas=[0.9,0.95]",
        "train.betas = (0.9, 0.95) and train.optimizer = 'muon' and model.lora.rank = 8: ",
    ),
    (
        "train.optimizer=muon model.lora.rank=8 train.eps=1e-6",
        "train.eps = 1e-06 and train.optimizer = 'muon' and model.lora.rank = 8: ",
    ),
    (
        "model.master_dtype=bfloat16",
        "model.master_dtype = 'bfloat16' and train.learning_rate = 1e-06: ",
    ),
    (
        "train.max_tokens_per_micro_batch=512 train.micro_batches=2",
        "train.max_tokens_per_micro_batch = 512 and train.micro_batches = 2: ",
    ),
    ("eval.temperature=1.0", "eval.temperature = 1.0 and data.eval = None and eval.sets = {}: "),
    (
        "eval.samples=4 eval.temperature=1.0",
        "eval.samples = 4 and data.eval = None and eval.sets = {}: ",
    ),
    ("eval.top_p=0.9", "eval.top_p = 0.9 and data.eval = None and eval.sets = {}: "),
    ("eval.top_k=9", "eval.top_k = 9 and data.eval = None and eval.sets = {}: "),
    ("eval.top_p=0.9 data.eval=e.jsonl", "eval.top_p = 0.9 and eval.temperature = 0.0: "),
    ("eval.top_k=9 data.eval=e.jsonl", "eval.top_k = 9 and eval.temperature = 0.0: "),
    ("eval.max_new_tokens=9", "eval.max_new_tokens = 9 and data.eval = None and eval.sets = {}: "),
    ("data.eval_limit=9", "data.eval_limit = 9 and data.eval = None and eval.sets = {}: "),
    ("train.eval_every=5", "train.eval_every = 5 and data.eval = None: "),
    (
        "train.keep_best_by=reward data.eval=eval.jsonl",
        "train.keep_best_by = 'reward' and train.eval_every = 0: ",
    ),
    (
        "data.format=chat data.prompt_column=question",
        "data.prompt_column = 'question' and data.format = 'chat': ",
    ),
    (
        "data.format=text data.messages_column=chat",
        "data.messages_column = 'chat' and data.format = 'text': ",
    ),
]
MEANT = [
    'model.lora.rank=512 pool.engine=vllm model.lora.alpha=8 model.lora.targets=["q_proj"]',
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
    "train.teacher_kl_coef=0.1 pools.teacher.model_path=models/large",
    "train.advantage=none train.teacher_kl_coef=1 pools.teacher.model_path=models/large "
    "reward.function= rollout.group_size=1",
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED)
def test_a_combination_without_a_sensible_meaning_is_refused(overrides: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_with(overrides)

    assert str(raised.value).startswith(f"{overrides} (command line): {said}")


TEACHER = "train.teacher_kl_coef=1 pools.teacher.model_path=models/large"
REFUSED_WITH_A_TEACHER = [
    (
        "reward.function=",
        "reward.function = None and reward.functions = {} and train.advantage = 'grpo': ",
    ),
    (
        "train.advantage=none rollout.drop_zero_variance_groups=true",
        "train.advantage = 'none' and rollout.drop_zero_variance_groups = True: ",
    ),
    (
        "rollout.temperature=0.8",
        "train.teacher_kl_coef = 1.0 and rollout.temperature = 0.8 and rollout.top_p = 1.0 and "
        "rollout.top_k = 0: ",
    ),
    ("train.loss=gspo", "train.loss = 'gspo' and train.teacher_kl_coef = 1.0: "),
    (
        "train.advantage=none reward.function= data.eval=eval.jsonl",
        "reward.function = None and reward.functions = {} and data.eval = 'eval.jsonl' and "
        "eval.sets = {}: ",
    ),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED_WITH_A_TEACHER)
def test_a_combination_that_no_teacher_makes_sense_of_is_refused(overrides: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_with(f"{TEACHER} {overrides}")

    assert said in str(raised.value)


@pytest.mark.parametrize(("overrides", "said"), QUESTIONABLE)
def test_a_combination_that_is_probably_not_meant_is_warned_about(
    overrides: str, said: str
) -> None:
    found = warnings(config_with(overrides))

    assert any(text.startswith(said) for text in found)


@pytest.mark.parametrize("overrides", ["", *MEANT])
def test_sensible_combinations_pass_in_silence(overrides: str) -> None:
    assert warnings(config_with(overrides)) == []


def test_every_rule_has_a_case() -> None:
    said = [text for _, text in (*REFUSED, *REFUSED_WITH_A_TEACHER, *QUESTIONABLE)]

    unproved = [
        rule.settings
        for rule in RULES
        if not any(
            [part.split(" = ")[0] for part in text.split(" and ")] == list(rule.settings)
            for text in said
        )
    ]

    assert unproved == []


def test_the_length_of_a_run_is_given() -> None:
    with pytest.raises(
        ConfigError, match=r"^config: train\.steps = None and train\.epochs = None: "
    ):
        config_with("train.steps=")


def test_all_refusals_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.temperature = 0\.0.*; .*train\.offload = "):
        config_with("rollout.temperature=0.0 train.offload=all pool.mode=standalone")


def test_k1_is_no_estimator_of_a_loss() -> None:
    with pytest.raises(ConfigError, match=r"kl_estimator=k1 .*: input should be 'k2' or 'k3'"):
        config_with("train.kl_coef=0.1 train.kl_estimator=k1")
