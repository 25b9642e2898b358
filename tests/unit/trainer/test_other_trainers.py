"""An unknown setting with the name of another trainer is answered with what umbra has."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from umbra.runtime.errors import ConfigError
from umbra.runtime.settings import annotations_of
from umbra.trainer.config.config_file import check_config
from umbra.trainer.config.other_trainers import other_names, other_trainers_hint
from umbra.trainer.config.trainer_config import TrainerConfig

MINIMAL: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"train": "d.jsonl"},
    "reward": {"function": "r:f"},
    "train": {"steps": 1},
}
ABSENT = "umbra does not have it; see docs/coming-from.md"
RECIPES = {
    "verl": """
        algorithm.adv_estimator algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef
        algorithm.filter_groups.enable algorithm.filter_groups.metric algorithm.gamma
        algorithm.norm_adv_by_std_in_grpo algorithm.rollout_correction.rollout_is_threshold
        data.train_files data.val_files data.train_batch_size data.gen_batch_size
        data.max_prompt_length data.max_response_length data.filter_overlong_prompts
        data.truncation data.prompt_key data.image_key data.return_raw_chat
        actor_rollout_ref.model.path actor_rollout_ref.model.enable_gradient_checkpointing
        actor_rollout_ref.model.use_remove_padding actor_rollout_ref.model.lora_rank
        actor_rollout_ref.actor.optim.lr actor_rollout_ref.actor.optim.lr_warmup_steps_ratio
        actor_rollout_ref.actor.optim.weight_decay actor_rollout_ref.actor.grad_clip
        actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.use_dynamic_bsz
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu actor_rollout_ref.actor.use_kl_loss
        actor_rollout_ref.actor.kl_loss_coef actor_rollout_ref.actor.kl_loss_type
        actor_rollout_ref.actor.clip_ratio_low actor_rollout_ref.actor.clip_ratio_high
        actor_rollout_ref.actor.clip_ratio_c actor_rollout_ref.actor.entropy_coeff
        actor_rollout_ref.actor.loss_agg_mode actor_rollout_ref.actor.policy_loss.loss_mode
        actor_rollout_ref.actor.fsdp_config.param_offload
        actor_rollout_ref.actor.ulysses_sequence_parallel_size
        actor_rollout_ref.actor.megatron.tensor_model_parallel_size
        actor_rollout_ref.ref.fsdp_config.param_offload actor_rollout_ref.rollout.name
        actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu actor_rollout_ref.rollout.mode
        actor_rollout_ref.rollout.n actor_rollout_ref.rollout.tensor_model_parallel_size
        actor_rollout_ref.rollout.gpu_memory_utilization actor_rollout_ref.rollout.top_p
        actor_rollout_ref.rollout.temperature actor_rollout_ref.rollout.max_num_batched_tokens
        actor_rollout_ref.rollout.enable_chunked_prefill actor_rollout_ref.rollout.enforce_eager
        actor_rollout_ref.rollout.val_kwargs.n actor_rollout_ref.rollout.val_kwargs.temperature
        actor_rollout_ref.rollout.val_kwargs.top_p actor_rollout_ref.rollout.multi_turn.enable
        actor_rollout_ref.rollout.multi_turn.tool_config_path custom_reward_function.path
        reward_model.reward_manager critic.optim.lr critic.model.path trainer.critic_warmup
        trainer.logger trainer.project_name trainer.experiment_name trainer.n_gpus_per_node
        trainer.nnodes trainer.save_freq trainer.test_freq trainer.total_epochs
        trainer.val_before_train trainer.resume_mode trainer.default_local_dir
    """,
    "TRL": """
        model_name_or_path bf16 num_train_epochs max_steps num_generations beta epsilon
        epsilon_high delta max_completion_length max_prompt_length top_p top_k min_p
        per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing
        reward_funcs reward_weights scale_rewards loss_type importance_sampling_level
        mask_truncated_completions use_vllm vllm_mode vllm_gpu_memory_utilization
        vllm_tensor_parallel_size lr_scheduler_type save_steps save_total_limit eval_steps
        eval_strategy output_dir report_to run_name logging_steps peft_config lora_r deepspeed
    """,
    "slime": """
        hf-checkpoint ref-load load save save-interval prompt-data input-key label-key
        apply-chat-template rollout-shuffle rm-type num-rollout rollout-batch-size
        n-samples-per-prompt rollout-max-response-len rollout-temperature global-batch-size
        balance-data eval-interval eval-prompt-data n-samples-per-eval-prompt
        eval-max-response-len eval-top-p tensor-model-parallel-size sequence-parallel
        pipeline-model-parallel-size recompute-granularity use-dynamic-batch-size
        max-tokens-per-gpu advantage-estimator use-kl-loss kl-loss-coef kl-loss-type
        entropy-coef eps-clip eps-clip-high optimizer lr lr-decay-style adam-beta1 adam-beta2
        rollout-num-gpus-per-engine sglang-mem-fraction-static use-tis actor-num-gpus-per-node
        colocate skip-eval-before-train lora-rank
    """,
    "AReaL": """
        total_train_epochs allocation_mode cluster.fileroot rollout.max_concurrent_rollouts
        rollout.max_head_offpolicyness gconfig.n_samples gconfig.max_new_tokens gconfig.greedy
        actor.path actor.mb_spec.max_tokens_per_mb actor.optimizer.lr actor.eps_clip
        actor.optimizer.warmup_steps_proportion actor.reward_scaling actor.kl_ctl
        actor.ppo_n_minibatches actor.use_decoupled_loss actor.behav_imp_weight_cap
        actor.adv_norm.mean_level actor.use_lora ref.path sglang.mem_fraction_static
        vllm.max_model_len train_dataset.path train_dataset.batch_size valid_dataset.path
        saver.freq_epochs evaluator.freq_steps recover.mode stats_logger.wandb.mode
    """,
    "prime-rl": """
        max_steps seq_len model.name deployment.num_train_gpus wandb.project trainer.optim.lr
        trainer.model.lora.rank trainer.model.ac orchestrator.batch_size orchestrator.group_size
        orchestrator.rollouts_per_example orchestrator.sampling.max_tokens ckpt.interval
        orchestrator.train.sampling.max_completion_tokens orchestrator.max_off_policy_steps
        orchestrator.eval.interval inference.parallel.tp inference.gpu_memory_utilization
    """,
    "OpenRLHF": """
        pretrain remote_rm_url actor_learning_rate critic_learning_rate prompt_max_len
        generate_max_len max_epochs num_episodes n_samples_per_prompt rollout_batch_size
        train_batch_size micro_train_batch_size init_kl_coef use_kl_loss advantage_estimator
        dynamic_filtering eps_clip_low_high vllm_num_engines colocate_all_models zero_stage
        packing_samples gamma save_path ckpt_path vllm_sync_backend
    """,
    "NeMo-RL": """
        grpo.num_prompts_per_step grpo.num_generations_per_prompt grpo.max_num_epochs
        grpo.val_period grpo.val_at_start grpo.use_leave_one_out_baseline
        loss_fn.reference_policy_kl_penalty loss_fn.ratio_clip_min loss_fn.token_level_loss
        checkpointing.save_period checkpointing.keep_top_k policy.model_name
        policy.train_global_batch_size policy.max_total_sequence_length policy.precision
        policy.optimizer.kwargs.lr policy.generation.vllm_cfg.tensor_parallel_size
        policy.dtensor_cfg.lora_cfg.enabled policy.megatron_cfg.enabled data.dataset_name
        env.math.num_workers logger.wandb_enabled cluster.gpus_per_node
    """,
}


def own_settings() -> dict[str, set[str]]:
    """The keys of each section."""
    return {
        name: {field.name for field in dataclasses.fields(section)}
        for name, section in annotations_of(TrainerConfig).items()
        if dataclasses.is_dataclass(section)
    }


def said_about(override: str) -> str:
    """The answer in the error about an override, without the settings that are allowed."""
    with pytest.raises(ConfigError) as raised:
        check_config(TrainerConfig, MINIMAL, "config", [override])
    (_, _, answer) = str(raised.value).partition(" is unknown; ")
    return answer.partition(" (allowed: ")[0]


def test_all_answers_are_settings_of_umbra() -> None:
    known = {f"{section}.{key}" for section, keys in own_settings().items() for key in keys}

    answers = {answer for names in other_names().values() for answer in names.values()}

    given = {one for answer in answers for one in answer.removeprefix("~ ").split(", ") if one}
    assert given <= known


@pytest.mark.parametrize("trainer", RECIPES)
def test_names_that_recipes_of_others_use_are_answered(trainer: str) -> None:
    unanswered = [
        name
        for name in RECIPES[trainer].split()
        if f" of {trainer}" not in other_trainers_hint(name.split("."), 1)
        and f" and {trainer}" not in other_trainers_hint(name.split("."), 1)
    ]

    assert unanswered == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.beta=0.1", "'beta' of TRL: use 'train.kl_coef'"),
        (
            "train.eps_clip=0.2",
            "'eps_clip' of slime and AReaL and OpenRLHF: use 'train.clip_eps_low' and "
            "'train.clip_eps_high'",
        ),
        ("rollout.num-generations=8", "'num_generations' of TRL: use 'rollout.group_size'"),
        ("rollout.n=8", "'rollout.n' of verl: use 'rollout.group_size'"),
        ("train.n=8", "'n' of verl: use 'rollout.group_size'"),
        ("rollout.val_kwargs.n=8", "'rollout.val_kwargs.n' of verl: use 'eval.samples'"),
        ("val_kwargs.n=8", "'val_kwargs.n' of verl: use 'eval.samples'"),
        (
            "+actor_rollout_ref.rollout.n=8",
            "'actor_rollout_ref.rollout.n' of verl: use 'rollout.group_size'",
        ),
        ("critic.optim.lr=1e-5", f"'critic.optim.lr' of verl and AReaL: {ABSENT}"),
        ("model.name=x", "'model.name' of prime-rl: use 'model.path'"),
        ("optim.lr=1e-5", "'optim.lr' of verl and prime-rl: use 'train.learning_rate'"),
        ("trainer.total_epochs=3", "'trainer.total_epochs' of verl: use 'train.epochs'"),
        ("trainer.model.lora.rank=8", f"'trainer.model.lora.rank' of prime-rl: {ABSENT}"),
        ("train.peft_config=x", f"'peft_config' of TRL: {ABSENT}"),
        ("generation_kwargs.min_p=0.1", f"'generation_kwargs.min_p' of TRL: {ABSENT}"),
        ('generation_kwargs.stop=["x"]', "'generation_kwargs.stop' of TRL: use 'rollout.stop'"),
        (
            "actor.ppo_mini_batch_size=64",
            "'actor.ppo_mini_batch_size' of verl: not in umbra; nearest is "
            "'train.updates_per_batch'",
        ),
    ],
)
def test_a_name_is_looked_up_by_its_path(override: str, said: str) -> None:
    assert said_about(override) == said


def test_all_settings_of_a_foreign_section_are_answered() -> None:
    values = MINIMAL | {"data": {"train": "d", "val_files": "e"}, "gconfig": {"n_samples": 4}}

    with pytest.raises(ConfigError) as raised:
        check_config(TrainerConfig, values, "config")

    assert "'data.val_files' of verl: use 'data.eval'" in str(raised.value)
    assert "'gconfig.n_samples' of AReaL: use 'rollout.group_size'" in str(raised.value)


def test_epochs_are_no_epsilon() -> None:
    with pytest.raises(ConfigError, match=r"epochs is unknown; did you mean 'train\.epochs'\?"):
        check_config(TrainerConfig, MINIMAL | {"epochs": 2}, "config")
