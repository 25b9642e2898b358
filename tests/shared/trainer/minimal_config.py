"""The least that the config of a training run has, and configs of it with changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from umbra.trainer.config.config_file import check_config
from umbra.trainer.config.trainer_config import TrainerConfig

MINIMAL: Final[dict[str, Any]] = {
    "model": {"path": "models/tiny"},
    "data": {"train": "train.jsonl"},
    "reward": {"function": "rewards:score"},
    "train": {"steps": 10},
}


def config_with(
    overrides: str = "", *, model_dir: Path | None = None, **sections: Any
) -> TrainerConfig:
    """The minimal config with the settings of `sections` and then the overrides, separated by
    spaces; `model_dir` is the folder of the model."""
    values = MINIMAL if model_dir is None else MINIMAL | {"model": {"path": str(model_dir)}}
    changed = {name: {**values.get(name, {}), **section} for name, section in sections.items()}
    return check_config(TrainerConfig, values | changed, "config", overrides.split())
