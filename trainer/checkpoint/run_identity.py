"""The settings and files that a resume may not change, besides prompts (`kept_prompts`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.ledger.ledger_history import managers_of
from umbra.runtime.text.model_tokenizer import ModelTokenizer, TokenizerState
from umbra.trainer.checkpoint.run_dir import NEW_RUN, RunDir, recorded_identity
from umbra.trainer.checkpoint.trainer_state import complete_checkpoints
from umbra.trainer.config.trainer_config import TrainerConfig

_ORDER = ("train.seed", "data.shuffle")
_REWARD = "reward.function"


def run_identity(
    config: TrainerConfig, tokenizer: ModelTokenizer, folders: Sequence[str]
) -> dict[str, Any]:
    """The settings that decide the order of prompts, and digests of what decides a sample's text
    and reward. The reward function is searched for in `folders`, as workers do."""
    return {
        "train.seed": config.train.seed,
        "data.shuffle": config.data.shuffle,
        "tokenizer": xxhash.xxh3_128_hexdigest(_vocabulary(tokenizer.state)),
        "chat template": xxhash.xxh3_128_hexdigest(tokenizer.state.chat_template.encode()),
        _REWARD: xxhash.xxh3_128_hexdigest(_rewards(config, folders)),
    }


def _rewards(config: TrainerConfig, folders: Sequence[str]) -> bytes:
    weights = repr(sorted(config.reward.weights.items())) if config.reward.weights else ""
    sources = (_source(target, folders) for target in config.reward.targets.values())
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
            "warning: reward.function, or the file that it is in, changed since the run's last "
            "start: groups that are scored already keep the rewards of the earlier one"
        )


def _vocabulary(state: TokenizerState) -> bytes:
    """Tokens and merges; empty for a tokenizer written in Python. The rest of the state may change
    with the version of a library."""
    content = json.loads(state.tokenizer or "{}")
    return json.dumps([content.get("model"), content.get("added_tokens")], sort_keys=True).encode()


def _written(value: object) -> str:
    return json.dumps(value)


def _source(function: str, folders: Sequence[str]) -> bytes:
    """The function's name and the source of its module, if that is in one of the folders."""
    module = function.partition(":")[0].replace(".", "/")
    paths = [
        Path(folder) / each
        for folder in folders
        for each in (f"{module}.py", f"{module}/__init__.py")
    ]
    found = next((path.read_bytes() for path in paths if path.is_file()), b"")
    return function.encode() + b"\0" + found
