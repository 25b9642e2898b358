"""Settings of other trainers by their names there, and the settings that do the same here.

The error about an unknown setting uses it: it has umbra's name for somebody who comes from TRL,
verl, AReaL, slime or prime-rl. docs/coming-from.md compares values and meanings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

_TRL, _VERL, _AREAL, _SLIME, _PRIME = "TRL", "verl", "AReaL", "slime", "prime-rl"

OTHER_NAMES: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    # algorithm
    "beta": ((_TRL,), ("train.kl_coef",)),
    "kl_loss_coef": ((_VERL, _SLIME), ("train.kl_coef",)),
    "kl_ctl": ((_AREAL,), ("train.kl_coef",)),
    "kl_loss_type": ((_VERL, _SLIME), ("train.kl_estimator",)),
    "epsilon": ((_TRL,), ("train.clip_eps_low", "train.clip_eps_high")),
    "epsilon_high": ((_TRL,), ("train.clip_eps_high",)),
    "clip_ratio": ((_VERL,), ("train.clip_eps_low", "train.clip_eps_high")),
    "clip_ratio_low": ((_VERL,), ("train.clip_eps_low",)),
    "clip_ratio_high": ((_VERL,), ("train.clip_eps_high",)),
    "eps_clip": ((_AREAL, _SLIME), ("train.clip_eps_low", "train.clip_eps_high")),
    "eps_clip_higher": ((_AREAL,), ("train.clip_eps_high",)),
    "eps_clip_high": ((_SLIME,), ("train.clip_eps_high",)),
    "vllm_importance_sampling_clip_max": ((_TRL,), ("train.importance_cap",)),
    "tis_clip": ((_SLIME,), ("train.importance_cap",)),
    "tis_clip_low": ((_SLIME,), ("train.importance_floor",)),
    "use_decoupled_loss": ((_AREAL,), ("train.loss",)),
    "use_tis": ((_SLIME,), ("train.loss",)),
    "loss_type": ((_TRL, _SLIME), ("train.loss", "train.loss_aggregation")),
    "loss_mode": ((_VERL,), ("train.loss",)),
    "custom_loss_function_path": ((_SLIME,), ("train.loss",)),
    "importance_sampling_level": ((_TRL, _AREAL), ("train.loss",)),
    "loss_agg_mode": ((_VERL,), ("train.loss_aggregation",)),
    "calculate_per_token_loss": ((_SLIME,), ("train.loss_aggregation",)),
    "scale_rewards": ((_TRL,), ("train.advantage",)),
    "adv_estimator": ((_VERL,), ("train.advantage",)),
    "norm_adv_by_std_in_grpo": ((_VERL,), ("train.advantage",)),
    "adv_norm": ((_AREAL,), ("train.advantage",)),
    "advantage_estimator": ((_SLIME,), ("train.advantage",)),
    "disable_grpo_std_normalization": ((_SLIME,), ("train.advantage",)),
    # optimizer
    "lr": ((_VERL, _AREAL, _SLIME, _PRIME), ("train.learning_rate",)),
    "lr_scheduler_type": ((_TRL, _VERL, _AREAL), ("train.schedule",)),
    "warmup_style": ((_VERL,), ("train.schedule",)),
    "lr_warmup_steps": ((_VERL,), ("train.warmup_steps",)),
    "adam_beta1": ((_TRL,), ("train.betas",)),
    "adam_beta2": ((_TRL,), ("train.betas",)),
    "adam_epsilon": ((_TRL,), ("train.eps",)),
    "grad_clip": ((_VERL,), ("train.max_grad_norm",)),
    "clip_grad": ((_VERL, _SLIME), ("train.max_grad_norm",)),
    "gradient_clipping": ((_AREAL,), ("train.max_grad_norm",)),
    "max_norm": ((_PRIME,), ("train.max_grad_norm",)),
    # batches
    "num_generations": ((_TRL,), ("rollout.group_size",)),
    "n": ((_VERL,), ("rollout.group_size",)),
    "n_samples": ((_AREAL,), ("rollout.group_size",)),
    "n_samples_per_prompt": ((_SLIME,), ("rollout.group_size",)),
    "train_batch_size": ((_VERL,), ("rollout.groups_per_step",)),
    "rollout_batch_size": ((_SLIME,), ("rollout.groups_per_step",)),
    "batch_size": ((_AREAL, _PRIME), ("rollout.groups_per_step", "rollout.group_size")),
    "global_batch_size": ((_SLIME,), ("rollout.groups_per_step", "rollout.group_size")),
    "generation_batch_size": ((_TRL,), ("rollout.groups_per_step", "rollout.group_size")),
    "per_device_train_batch_size": (
        (_TRL,),
        ("rollout.groups_per_step", "rollout.group_size"),
    ),
    "gradient_accumulation_steps": ((_TRL,), ("train.micro_batches",)),
    "n_mbs": ((_AREAL,), ("train.micro_batches",)),
    "ppo_max_token_len_per_gpu": ((_VERL,), ("train.max_tokens_per_micro_batch",)),
    "max_tokens_per_mb": ((_AREAL,), ("train.max_tokens_per_micro_batch",)),
    "max_tokens_per_gpu": ((_SLIME,), ("train.max_tokens_per_micro_batch",)),
    "num_iterations": ((_TRL,), ("train.updates_per_batch",)),
    "ppo_epochs": ((_VERL,), ("train.updates_per_batch",)),
    "filter_groups": ((_VERL,), ("rollout.drop_zero_variance_groups",)),
    "dynamic_sampling_filter_path": ((_SLIME,), ("rollout.drop_zero_variance_groups",)),
    "over_sampling_batch_size": ((_SLIME,), ("rollout.over_sampling",)),
    # generation
    "max_completion_length": ((_TRL,), ("rollout.max_new_tokens",)),
    "max_response_length": ((_VERL,), ("rollout.max_new_tokens",)),
    "rollout_max_response_len": ((_SLIME,), ("rollout.max_new_tokens",)),
    "max_completion_tokens": ((_PRIME,), ("rollout.max_new_tokens",)),
    "max_prompt_length": ((_TRL, _VERL), ("pool.max_context_len",)),
    "vllm_max_model_length": ((_TRL,), ("pool.max_context_len",)),
    "max_model_len": ((_VERL, _AREAL), ("pool.max_context_len",)),
    "rollout_max_context_len": ((_SLIME,), ("pool.max_context_len",)),
    "seq_len": ((_PRIME,), ("pool.max_context_len",)),
    "filter_overlong_prompts": ((_VERL,), ("data.overlong",)),
    "rollout_temperature": ((_SLIME,), ("rollout.temperature",)),
    "rollout_stop_token_ids": ((_SLIME,), ("rollout.stop_token_ids",)),
    "max_head_offpolicyness": ((_AREAL,), ("rollout.max_staleness",)),
    "max_off_policy_steps": ((_PRIME,), ("rollout.max_staleness",)),
    "max_concurrent_rollouts": ((_AREAL,), ("pool.max_num_seqs", "rollout.agent_concurrency")),
    "custom_generate_function_path": ((_SLIME,), ("rollout.agent",)),
    "default_agent_loop": ((_VERL,), ("rollout.agent",)),
    "use_vllm": ((_TRL,), ("pool.engine",)),
    "vllm_mode": ((_TRL,), ("pool.mode",)),
    "colocate": ((_SLIME,), ("pool.mode",)),
    "vllm_gpu_memory_utilization": ((_TRL,), ("pool.kv_cache_num_tokens",)),
    "gpu_memory_utilization": ((_VERL, _AREAL, _PRIME), ("pool.kv_cache_num_tokens",)),
    "mem_fraction_static": ((_AREAL,), ("pool.kv_cache_num_tokens",)),
    "vllm_tensor_parallel_size": ((_TRL,), ("pool.engine_args",)),
    "tensor_model_parallel_size": ((_VERL,), ("pool.engine_args",)),
    "rollout_num_gpus_per_engine": ((_SLIME,), ("pool.engine_args",)),
    "engine_kwargs": ((_VERL,), ("pool.engine_args",)),
    # model and memory
    "model_name_or_path": ((_TRL,), ("model.path",)),
    "hf_checkpoint": ((_SLIME,), ("model.path",)),
    "bf16": ((_TRL,), ("model.dtype",)),
    "gradient_checkpointing": ((_TRL, _AREAL), ("train.activation_checkpointing",)),
    "enable_gradient_checkpointing": ((_VERL,), ("train.activation_checkpointing",)),
    "torch_compile": ((_TRL,), ("train.compile",)),
    "use_torch_compile": ((_VERL,), ("train.compile",)),
    "optimizer_offload": ((_VERL,), ("train.offload",)),
    "param_offload": ((_VERL,), ("train.offload",)),
    "offload_train": ((_SLIME,), ("train.offload",)),
    # data and reward
    "dataset_name": ((_TRL,), ("data.train",)),
    "train_files": ((_VERL,), ("data.train",)),
    "train_dataset": ((_AREAL,), ("data.train",)),
    "prompt_data": ((_SLIME,), ("data.train",)),
    "val_files": ((_VERL,), ("data.eval",)),
    "valid_dataset": ((_AREAL,), ("data.eval",)),
    "eval_prompt_data": ((_SLIME,), ("data.eval",)),
    "prompt_key": ((_VERL,), ("data.prompt_column",)),
    "input_key": ((_SLIME,), ("data.prompt_column",)),
    "shuffle_dataset": ((_TRL,), ("data.shuffle",)),
    "rollout_shuffle": ((_SLIME,), ("data.shuffle",)),
    "custom_reward_function": ((_VERL,), ("reward.function",)),
    "custom_rm_path": ((_SLIME,), ("reward.function",)),
    "n_samples_per_eval_prompt": ((_SLIME,), ("eval.samples",)),
    "eval_temperature": ((_SLIME,), ("eval.temperature",)),
    # run
    "max_steps": ((_TRL, _PRIME), ("train.steps",)),
    "total_training_steps": ((_VERL,), ("train.steps",)),
    "total_train_steps": ((_AREAL,), ("train.steps",)),
    "num_rollout": ((_SLIME,), ("train.steps",)),
    "eval_steps": ((_TRL,), ("train.eval_every",)),
    "test_freq": ((_VERL,), ("train.eval_every",)),
    "eval_interval": ((_SLIME,), ("train.eval_every",)),
    "save_steps": ((_TRL,), ("train.checkpoint_every",)),
    "save_freq": ((_VERL,), ("train.checkpoint_every",)),
    "save_interval": ((_SLIME,), ("train.checkpoint_every",)),
    "save_total_limit": ((_TRL,), ("train.keep_checkpoints",)),
    "max_actor_ckpt_to_keep": ((_VERL,), ("train.keep_checkpoints",)),
    "keep_last": ((_PRIME,), ("train.keep_checkpoints",)),
    "output_dir": ((_TRL, _PRIME), ("run.dir",)),
    "default_local_dir": ((_VERL,), ("run.dir",)),
    "fileroot": ((_AREAL,), ("run.dir",)),
    "run_name": ((_TRL,), ("run.name",)),
    "experiment_name": ((_VERL, _AREAL), ("run.name",)),
    "report_to": ((_TRL,), ("run.loggers",)),
    "logger": ((_VERL,), ("run.loggers",)),
    "resume_from_checkpoint": ((_TRL,), ("run.resume",)),
    "resume_mode": ((_VERL,), ("run.resume",)),
    "n_gpus_per_node": ((_VERL, _AREAL), ("job.trainer_gpus_per_node",)),
    "actor_num_gpus_per_node": ((_SLIME,), ("job.trainer_gpus_per_node",)),
}
"""Name in other trainers -> those trainers, and umbra's settings with section. Sections of their
names are left out, and so are names that are umbra's, too."""


def other_trainers_hint(key: str, value: Any) -> str:
    """What umbra calls an unknown setting; "" if no other trainer has it.

    Args:
        value: a table is a section there, such as verl's `actor_rollout_ref`: its settings count.
    """
    names = [key]
    if isinstance(value, Mapping):
        names += _keys_within(cast("Mapping[str, Any]", value))
    found = dict.fromkeys(name.replace("-", "_") for name in names)
    hints = [_hint(name) for name in found if name in OTHER_NAMES]
    return "; ".join(hints)


def _hint(name: str) -> str:
    trainers, settings = OTHER_NAMES[name]
    ours = " and ".join(map(repr, settings))
    return f"for {name!r} of {' and '.join(trainers)} use {ours}"


def _keys_within(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        yield key
        if isinstance(value, Mapping):
            yield from _keys_within(cast("Mapping[str, Any]", value))
