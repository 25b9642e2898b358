"""The processes of auxiliary pools, such as a judge, and their settings for rollout workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.restart_policy import RestartPolicy
from umbra.runtime.engine_api.engine_names import engine_target
from umbra.runtime.errors import DataError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.trainer.config.auxiliary_pool_config import AuxiliaryPoolSection
from umbra.trainer.config.config_section import engine_settings, lora_settings
from umbra.trainer.config.trainer_config import ServeConfig, TrainerConfig
from umbra.trainer.data.prompt_tokenizer import (
    default_context_len,
    known_stop_token_ids,
    read_model_config,
    vocab_size,
)

T = TypeVar("T")
_BUSY_WAIT_S: Final = 10.0
"""Default of `max_wait_s` if the policy always has work, so that the judge gets its time."""


def auxiliary_pool_specs(
    config: TrainerConfig | ServeConfig, device_type: str, host: str, *, host_gets_idle: bool
) -> list[PoolSpec]:
    """The specifications of all auxiliary pools.

    Args:
        device_type: the trainer's.
        host: name of the pool whose GPUs colocated pools share.
        host_gets_idle: whether the host is idle from time to time.
    """
    return [_pool_spec(name, config, device_type, host, host_gets_idle) for name in config.pools]


def _pool_spec(
    name: str,
    config: TrainerConfig | ServeConfig,
    device_type: str,
    host: str,
    host_gets_idle: bool,
) -> PoolSpec:
    pool = config.pools[name]
    cores = len(os.sched_getaffinity(0))
    kwargs: dict[str, Any] = {
        "model_path": str(pool.model_path.absolute()),
        "dtype": pool.dtype or config.model.dtype,
        "device": device_type if pool.device == "auto" else pool.device,
        "max_num_seqs": pool.max_num_seqs,
        "max_context_len": auxiliary_context_len(name, pool),
        "kv_cache_num_tokens": pool.kv_cache_num_tokens,
        "tick_ms": pool.tick_ms,
        "num_threads": pool.num_threads or max(1, cores // pool.count),
        **engine_settings(pool.engine, pool.engine_args),
        **lora_settings(pool.lora_adapters, pool.model_path),
    }
    is_colocated = pool.mode == "colocated"
    max_wait_s = pool.max_wait_s
    if max_wait_s is None and not host_gets_idle:
        max_wait_s = _BUSY_WAIT_S
    return PoolSpec(
        name=name,
        engine=engine_target(pool.engine),
        count=pool.count,
        mode=pool.mode,
        kwargs=kwargs,
        env=pool.env,
        load_weights=True,
        shares_with=host if is_colocated else "",
        max_wait_s=max_wait_s if is_colocated else None,
        max_turn_s=pool.max_turn_s,
        restart=RestartPolicy(mode="on_failure", max_restarts=pool.max_restarts, window_s=600.0),
        start_timeout_s=pool.start_timeout_s,
        hung_limit_s=pool.hung_limit_s,
        memory_limit_nbytes=pool.memory_limit_mib << 20,
    )


def generator_spec(name: str, config: TrainerConfig) -> ActorSpec:
    """The actor that handles user code's requests to a pool."""
    return ActorSpec(
        name=_generator_name(name),
        target="umbra.runtime.rollout.dispatch.generator_service:GeneratorService",
        kwargs={"config": auxiliary_generator_settings(name, config.pools[name])},
        role="rollout",
    )


def auxiliary_generator_settings(name: str, pool: AuxiliaryPoolSection) -> dict[str, Any]:
    """`GeneratorConfig` as a dict."""
    return {
        "pool": name,
        "max_context_len": auxiliary_context_len(name, pool),
        "vocab_size": _read(vocab_size, name, pool),
        "max_inflight_per_engine": pool.max_num_seqs,
        # Requests have deadlines of their own, and waiting for a sleeping pool is not a failure.
        "engine_timeout_s": pool.request_timeout_s,
        "shares_memory": pool.mode == "colocated",
    }


def worker_pool_configs(config: TrainerConfig) -> dict[str, dict[str, Any]]:
    """The pools' settings for rollout workers: `AuxiliaryPoolConfig` by name."""
    return {
        name: {
            "generator": _generator_name(name),
            "tokenizer_path": str(pool.model_path.absolute()),
            "stop_token_ids": _read(known_stop_token_ids, name, pool),
            "timeout_s": pool.request_timeout_s,
        }
        for name, pool in config.pools.items()
    }


def _generator_name(pool: str) -> str:
    return f"{pool}-generator"


def auxiliary_context_len(name: str, pool: AuxiliaryPoolSection) -> int:
    """Longest prompt + answer in tokens."""
    return pool.max_context_len or _read(default_context_len, name, pool)


def auxiliary_model_config(name: str, pool: AuxiliaryPoolSection) -> dict[str, Any]:
    """config.json of the pool's model. Raises DataError if there is none."""
    return _read(read_model_config, name, pool)


def _read(read: Callable[[Path], T], name: str, pool: AuxiliaryPoolSection) -> T:
    """Reads a model directory; errors name the pool's setting."""
    try:
        return read(pool.model_path)
    except DataError as error:
        raise DataError(str(error).replace("model.path", path_setting(name))) from error


def path_setting(name: str) -> str:
    """Name of the setting that has the pool's model directory."""
    return f"pools.{name}.model_path"
