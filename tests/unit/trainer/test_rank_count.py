"""How many ranks a launch script starts: one on each of the GPUs that the trainer may use."""

from __future__ import annotations

from typing import Any

import pytest

from umbra.runtime.cluster.environment import visible_gpus
from umbra.runtime.errors import ConfigError
from umbra.trainer.config.config_file import check_config
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.rank_count import num_ranks


def config_of(**sections: Any) -> TrainerConfig:
    values: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "reward": {"function": "rewards:score"},
        "train": {"steps": 10},
    }
    return check_config(TrainerConfig, values | sections, "config")


@pytest.mark.parametrize(
    ("named", "gpus"),
    [(None, ("0", "1")), ("3, 1", ("3", "1")), ("", ()), ("2,-1,3", ("2",)), ("0,1,2", ("0", "1"))],
)
def test_the_jobs_gpus_are_named_as_it_was_given_them(
    named: str | None, gpus: tuple[str, ...]
) -> None:
    environ = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}

    assert visible_gpus(2, environ) == gpus


@pytest.mark.parametrize(
    ("sections", "num_gpus", "expected"),
    [
        ({}, 8, 8),
        ({}, 0, 2),
        ({"job": {"trainer_gpus_per_node": 2}}, 8, 2),
        ({"job": {"trainer_gpus_per_node": 2}}, 0, 2),
        ({"train": {"steps": 1, "device": "cpu"}}, 8, 2),
    ],
)
def test_the_trainer_has_a_rank_on_each_of_its_gpus(
    sections: dict[str, Any], num_gpus: int, expected: int
) -> None:
    assert num_ranks(config_of(**sections), num_gpus) == expected


def test_more_trainer_gpus_than_there_are_is_an_error() -> None:
    config = config_of(job={"trainer_gpus_per_node": 4})

    with pytest.raises(ConfigError, match="trainer_gpus_per_node = 4, and this node shows 2 GPUs"):
        num_ranks(config, 2)
