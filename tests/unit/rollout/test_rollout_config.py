"""What a rollout manager gets: checked where it is made, and the same after its journey."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from rollout_configs import rollout_config

from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.rollout_config import RolloutConfig
from umbra.runtime.settings import from_wire, to_wire


def test_a_config_arrives_as_it_was_sent() -> None:
    config = rollout_config(stop_token_ids=(3, 5), agent="loops:run", shares_memory=True, seed=7)

    arrived = msgpack.unpackb(msgpack.packb(to_wire(config)))

    assert from_wire(RolloutConfig, arrived) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 0}, "group_size is 0: use 1 or more"),
        ({"stop": ("</a>", "")}, "stop: an empty text is in every completion: remove it"),
        ({"top_k": -1}, "top_k is -1: use 1 or more, or 0 for all tokens"),
        ({"top_p": 0.0}, "top_p is 0.0: use more than 0"),
        ({"temperature": -1.0}, "temperature is -1.0: use 0 or more"),
        ({"agent": "loop"}, "agent: a function is written as 'module:function', got 'loop'"),
        ({"batch_order": "random"}, "batch_order is 'random': use 'in_order' or 'first_finished'"),
        ({"max_context_len": 0}, "max_context_len is 0: use 1 or more"),
        ({"rank_timeout_s": 0.0}, "rank_timeout_s is 0.0: use more than 0"),
        ({"worker_names": ()}, "worker_names is empty"),
    ],
)
def test_a_wrong_setting_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rollout_config(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_sizes": 8}, "RolloutConfig: .* unexpected keyword argument 'group_sizes'"),
        ({"dispatch": {"max_context_len": 8}}, "DispatchConfig: .*missing .*'pool'"),
    ],
)
def test_values_of_another_release_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_wire(RolloutConfig, to_wire(rollout_config()) | change)
