"""How many ranks a launch script starts: one on each of the GPUs that the trainer may use."""

from __future__ import annotations

from typing import Any

import pytest
from minimal_config import config_with

from umbra.runtime.cluster.environment import visible_gpus
from umbra.runtime.errors import ConfigError
from umbra.trainer.config.launch_values import num_ranks


@pytest.mark.parametrize(
    ("named", "gpus"),
    [
        (None, ("0", "1", "2", "3")),
        ("3, 1", ("3", "1")),
        ("", ()),
        ("2,-1,3", ("2",)),
        ("GPU-b,GPU-a", ("GPU-b", "GPU-a")),
        ("MIG-b,MIG-a", ("MIG-b",)),
    ],
)
def test_the_jobs_gpus_are_named_as_it_was_given_them(
    named: str | None, gpus: tuple[str, ...]
) -> None:
    environ = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}

    assert visible_gpus(4, environ) == gpus


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("0,1,0", "is '0,1,0': name each GPU once"),
        ("0,4", "is '0,4', and the GPUs of this machine are 0 to 3"),
    ],
)
def test_a_gpu_that_cuda_would_not_use_is_an_error(named: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        visible_gpus(4, {"CUDA_VISIBLE_DEVICES": named})


def test_without_gpus_none_is_visible() -> None:
    assert visible_gpus(0, {"CUDA_VISIBLE_DEVICES": "0,1"}) == ()


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
    assert num_ranks(config_with(**sections), num_gpus) == expected


def test_more_trainer_gpus_than_there_are_is_an_error() -> None:
    config = config_with(job={"trainer_gpus_per_node": 4})

    with pytest.raises(ConfigError, match="trainer_gpus_per_node = 4, and this node shows 2 GPUs"):
        num_ranks(config, 2)
