"""Prepares the prompts of a run and starts its rollout manager. Rank 0 only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from umbra.trainer.checkpoint.run_dir import changed_settings, record_settings
from umbra.trainer.checkpoint.run_identity import (
    check_identity,
    instead_of_resuming,
    keeps_samples,
    run_identity,
)
from umbra.trainer.config import setting_rules
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.data.kept_prompts import KeptPrompts
from umbra.trainer.data.prompt_preparation import prepare_prompts
from umbra.trainer.reporting.console import ProgressDisplay
from umbra.trainer.services.services import (
    ServiceStarter,
    open_policy_tokenizer,
    prompt_budget,
    save_tokenizers,
    user_folders,
)


def start_rollouts(
    config: TrainerConfig,
    starter: ServiceStarter,
    display: ProgressDisplay,
    world_size: int,
    device_type: str,
) -> int:
    """Tokenizes the data, records the settings and starts the manager. Returns the number of
    training prompts. Raises ConfigError if the run in the directory had other data."""
    tokenizer = open_policy_tokenizer(config)
    identity = run_identity(config, tokenizer, user_folders(config))
    kept = None
    if keeps_samples(config.run.dir):
        remedy = instead_of_resuming(config.run.dir)
        check_identity(config.run.dir, identity, remedy, display.note)
        kept = KeptPrompts(config.run.dir, remedy, display.note)
    with display.activity("tokenizing the data", unit="prompts") as tokenizing:
        prompts = prepare_prompts(
            config.data,
            tokenizer,
            prompt_budget(config),
            folder=config.run.dir,
            min_prompts=world_size,
            groups_per_step=config.rollout.groups_per_step,
            on_prompt=tokenizing.count,
            kept=kept,
        )
    save_tokenizers(config, tokenizer, config.run.dir)  # not before a resume may be refused
    held_out = f", {prompts.num_eval:,} held out" if prompts.num_eval else ""
    display.note(f"{prompts.num_train:,} prompts to train on{held_out}")
    for warning in prompts.warnings:
        display.note(f"warning: {warning}")
    _record_settings(config, prompts.num_train, identity, display)
    stops = tokenizer.stop_token_ids(config.rollout.stop_token_ids)
    shown = ", ".join(f"{tokenizer.decode_all([token])!r} ({token})" for token in stops)
    display.note(f"completions end with {shown}")
    starter.start_manager(prompts, stops, world_size, device_type)
    return prompts.num_train


def _record_settings(
    config: TrainerConfig, num_prompts: int, identity: Mapping[str, Any], display: ProgressDisplay
) -> None:
    """Records the settings, with the steps of the epochs, and shows what is only known now."""
    shown = setting_rules.warnings(config)
    config = config.with_steps(num_prompts)
    if config.train.epochs is not None:
        display.note(f"train.epochs = {config.train.epochs} are {config.train.total_steps:,} steps")
    for text in setting_rules.warnings(config):
        if text not in shown:
            display.note(f"warning: {text}")
    if changed := changed_settings(config):
        display.note(f"changed since the last start: {', '.join(changed)}")
    record_settings(config, identity)
