"""Configs of rollout managers for tests: small, and any field of any part by its name alone."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from umbra.runtime.rollout.rollout_config import (
    BatchLayout,
    DispatchConfig,
    RolloutConfig,
    RolloutSettings,
)

_SMALL: dict[str, Any] = {
    "prompts_path": "none",
    "pool": "policy",
    "world_size": 1,
    "groups_per_step": 2,
    "group_size": 2,
    "max_new_tokens": 12,
    "max_context_len": 36,
    "worker_names": ("rewards",),
}


def rollout_config(**changes: Any) -> RolloutConfig:
    """`changes`: fields of the config, of its settings, its dispatch or its layout."""
    values = _SMALL | changes

    def of(kind: type) -> dict[str, Any]:
        return {f.name: values.pop(f.name) for f in fields(kind) if f.name in values}

    parts: dict[str, Any] = {
        "settings": RolloutSettings(**of(RolloutSettings)),
        "dispatch": DispatchConfig(**of(DispatchConfig)),
        "layout": BatchLayout(**of(BatchLayout)),
    }
    return RolloutConfig(**parts, **values)
