"""An unknown setting with the name of another trainer is answered with umbra's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from umbra.runtime.errors import ConfigError
from umbra.runtime.settings import annotations_of
from umbra.trainer.config.config_file import check_config
from umbra.trainer.config.other_trainers import OTHER_NAMES
from umbra.trainer.config.trainer_config import TrainerConfig

MINIMAL: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"train": "d.jsonl"},
    "reward": {"function": "r:f"},
    "train": {"steps": 1},
}


def own_settings() -> dict[str, set[str]]:
    """The keys of each section."""
    return {
        name: {field.name for field in dataclasses.fields(section)}
        for name, section in annotations_of(TrainerConfig).items()
        if dataclasses.is_dataclass(section)
    }


def test_all_answers_are_settings_of_umbra() -> None:
    known = {f"{section}.{key}" for section, keys in own_settings().items() for key in keys}

    assert {ours for _, answers in OTHER_NAMES.values() for ours in answers} <= known


def test_no_answered_name_is_a_setting_of_umbra() -> None:
    assert set[str]().union(*own_settings().values()).isdisjoint(OTHER_NAMES)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.beta=0.1", "train.beta is unknown; for 'beta' of TRL use 'train.kl_coef' (allowed"),
        ("rollout.num-generations=8", "of TRL use 'rollout.group_size'"),
        (
            "train.eps_clip=0.2",
            "AReaL and slime use 'train.clip_eps_low' and 'train.clip_eps_high'",
        ),
        (
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref is unknown; for 'n' of verl use 'rollout.group_size'",
        ),
    ],
)
def test_a_name_of_another_trainer_is_answered_with_ours(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_config(TrainerConfig, MINIMAL, "config", [override])

    assert said in str(raised.value)
