"""Prepares the prompts of a run and starts its rollout manager. Rank 0 only.

A resume may not change the settings and files of `run_identity`, nor the prompts (`kept_prompts`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.ledger.ledger_history import managers_of
from umbra.runtime.text.model_tokenizer import ModelTokenizer, TokenizerState
from umbra.trainer.checkpoint.run_dir import (
    BEGAN_AT,
    NEW_RUN,
    RunDir,
    changed_settings,
    recorded_identity,
    run_began_at,
)
from umbra.trainer.checkpoint.trainer_state import complete_checkpoints
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

_ORDER = ("train.seed", "data.shuffle")
_REWARD = "reward.function"


def start_rollouts(
    config: TrainerConfig,
    starter: ServiceStarter,
    display: ProgressDisplay,
    world_size: int,
    device_type: str,
) -> tuple[int, dict[str, Any]]:
    """Tokenizes the data and starts the manager. Returns the number of training prompts, and what
    `record_settings` is to keep of the data. Raises ConfigError if the run in the directory had
    other data."""
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
            sets=config.eval.sets,
            on_prompt=tokenizing.count,
            kept=kept,
        )
    save_tokenizers(config, tokenizer, config.run.dir)  # not before a resume may be refused
    held_out = f", {prompts.num_eval:,} held out" if prompts.num_eval else ""
    display.note(f"{prompts.num_train:,} prompts to train on{held_out}")
    for warning in prompts.warnings:
        display.note(f"warning: {warning}")
    _show_settings(config, prompts.num_train, display)
    stops = tokenizer.stop_token_ids(config.rollout.stop_token_ids)
    shown = ", ".join(f"{tokenizer.decode_all([token])!r} ({token})" for token in stops)
    display.note(f"completions end with {shown}")
    starter.start_manager(config, prompts, stops, world_size, device_type)
    return prompts.num_train, identity


def _show_settings(config: TrainerConfig, num_prompts: int, display: ProgressDisplay) -> None:
    shown = setting_rules.warnings(config)
    config = config.with_steps(num_prompts)
    if config.train.epochs is not None:
        display.note(f"train.epochs = {config.train.epochs} are {config.train.total_steps:,} steps")
    for text in setting_rules.warnings(config):
        if text not in shown:
            display.note(f"warning: {text}")
    if changed := changed_settings(config):
        display.note(f"changed since the last start: {', '.join(changed)}")


def run_identity(
    config: TrainerConfig, tokenizer: ModelTokenizer, folders: Sequence[str]
) -> dict[str, Any]:
    """The settings that decide the order of prompts, and digests of what decides a sample's text
    and reward. The reward function is searched for in `folders`, as workers do."""
    return {
        "train.seed": config.train.seed,
        "data.shuffle": config.data.shuffle,
        BEGAN_AT: run_began_at(config.run.dir).isoformat(),
        "tokenizer": xxhash.xxh3_128_hexdigest(_vocabulary(tokenizer.state)),
        "chat template": xxhash.xxh3_128_hexdigest(tokenizer.state.chat_template.encode()),
        _REWARD: xxhash.xxh3_128_hexdigest(_rewards(config, folders)),
    }


def _rewards(config: TrainerConfig, folders: Sequence[str]) -> bytes:
    reward = config.reward
    weights = repr(sorted(reward.weights.items())) if reward.weights else ""
    if reward.overlong_buffer:
        weights += repr((reward.overlong_buffer, reward.overlong_penalty))
    sources = (_source(target, folders) for target in reward.targets.values())
    return b"".join([weights.encode(), *sources])


def keeps_samples(run_dir: Path) -> bool:
    """Whether this start continues the samples of an earlier one."""
    return bool(managers_of(run_dir))


def instead_of_resuming(run_dir: Path) -> str:
    found = complete_checkpoints(RunDir(run_dir).checkpoints)
    if not found:
        return NEW_RUN
    return f"begin a new run from the checkpoint: another run.dir, and run.resume = '{found[-1]}'"


def check_identity(
    run_dir: Path, identity: Mapping[str, Any], remedy: str, note: Callable[[str], None]
) -> None:
    """Compares with the identity that the run's last start has recorded, if any. Raises ConfigError
    if samples that the run keeps do not belong to the present settings and files."""
    before = recorded_identity(run_dir)
    changed = [name for name in identity if name in before and before[name] != identity[name]]
    for name in changed:
        if name in _ORDER:
            raise ConfigError(
                f"{name} is {_written(identity[name])} and was {_written(before[name])} when the "
                "run began: it decides the order of the prompts, which the run keeps. Set it back, "
                f"or {remedy}"
            )
        if name != _REWARD:
            raise ConfigError(
                f"model.path: the {name} is not the one that the run began with, to which the "
                f"samples that it keeps belong: restore it, or {remedy}"
            )
        note(
            "warning: the reward (its settings, or the file of a function) changed since the run's "
            "last start: groups that are scored already keep the rewards of the earlier one"
        )


def _vocabulary(state: TokenizerState) -> bytes:
    """Tokens and merges; empty for a tokenizer written in Python. The rest of the state may change
    with the version of a library."""
    content = json.loads(state.tokenizer or "{}")
    return json.dumps([content.get("model"), content.get("added_tokens")], sort_keys=True).encode()


def _written(value: object) -> str:
    return json.dumps(value)


def _source(function: str, folders: Sequence[str]) -> bytes:
    module = function.partition(":")[0].replace(".", "/")
    paths = [
        Path(folder) / each
        for folder in folders
        for each in (f"{module}.py", f"{module}/__init__.py")
    ]
    found = next((path.read_bytes() for path in paths if path.is_file()), b"")
    return function.encode() + b"\0" + found
