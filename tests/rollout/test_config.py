from __future__ import annotations

from typing import Any

import pytest

from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.rollout_config import RolloutConfig

REQUIRED: dict[str, Any] = {
    "prompts_path": "prompts.msgpack",
    "pool": "policy",
    "world_size": 2,
    "groups_per_step": 4,
    "group_size": 8,
    "max_new_tokens": 16,
    "max_context_len": 64,
    "rollout_actors": ["rewards"],
}


def test_a_dict_becomes_a_config_with_defaults() -> None:
    config = RolloutConfig.from_wire(
        {**REQUIRED, "temperature": 1, "batch_order": "first_finished", "eval_path": None}
    )

    assert config.temperature == 1.0
    assert isinstance(config.temperature, float)
    assert config.batch_order == "first_finished"
    assert config.eval_path == ""
    assert config.stop_token_ids == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_sizes": 8}, "rollout.group_sizes is unknown; allowed: .*group_size"),
        ({"pool": None}, "rollout.pool is missing"),
        ({"group_size": "8"}, "rollout.group_size must be int, got str '8'"),
        ({"group_size": True}, "rollout.group_size must be int, got bool"),
        ({"group_size": 0}, "rollout.group_size must be positive, got 0"),
        ({"group_size": 1, "drop_zero_variance_groups": True}, "would drop every group"),
        ({"temperature": -1.0}, "rollout.temperature must not be negative"),
        ({"stop_token_ids": [1, "2"]}, r"rollout.stop_token_ids must be a list of int"),
        ({"rollout_actors": []}, "rollout.rollout_actors is empty"),
        (
            {"batch_order": "random"},
            "rollout.batch_order 'random' is not one of in_order, first_finished",
        ),
    ],
)
def test_a_wrong_setting_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutConfig.from_wire({**REQUIRED, **change})
