"""The processes of auxiliary pools, such as a judge, and their settings for rollout workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.cluster.placement import Plan
from umbra.runtime.errors import DataError
from umbra.runtime.pools.pool_settings import AuxiliaryPoolSettings
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rollout.agents.auxiliary_pool import AuxiliaryPoolConfig
from umbra.runtime.rollout.rollout_config import DispatchConfig
from umbra.runtime.text.model_files import default_context_len, read_model_config, vocab_size
from umbra.runtime.text.model_tokenizer import ModelTokenizer, tokenizer_path
from umbra.trainer.config.trainer_config import ServeConfig, TrainerConfig
from umbra.trainer.pool_specs import pool_spec

T = TypeVar("T")
_BUSY_WAIT_S: Final = 10.0
"""Default of `max_wait_s` if the policy always has work, so that the judge gets its time."""


def auxiliary_pool_spec(
    name: str,
    config: TrainerConfig | ServeConfig,
    plan: Plan,
    device_type: str,
    host: str,
    *,
    host_gets_idle: bool,
) -> PoolSpec:
    """The specification of one auxiliary pool.

    Args:
        plan: has the places of its engines.
        device_type: the trainer's.
        host: name of the pool whose GPUs colocated pools share.
        host_gets_idle: whether the host is idle from time to time.
    """
    pool = config.pools[name]
    is_colocated = pool.mode == "colocated"
    max_wait_s = pool.max_wait_s
    if max_wait_s is None and not host_gets_idle:
        max_wait_s = _BUSY_WAIT_S
    return pool_spec(
        name,
        pool,
        plan,
        model_path=pool.model_path,
        dtype=pool.dtype or config.model.dtype,
        device_type=device_type,
        max_context_len=auxiliary_context_len(name, pool),
        load_weights=True,
        shares_with=host if is_colocated else "",
        max_wait_s=max_wait_s if is_colocated else None,
    )


def generator_spec(name: str, config: TrainerConfig) -> ActorSpec:
    """The actor that handles user code's requests to a pool."""
    return ActorSpec(
        name=_generator_name(name),
        target="umbra.runtime.rollout.dispatch.generator_service:GeneratorService",
        kwargs={"config": auxiliary_dispatch(name, config.pools[name])},
        role="rollout",
    )


def auxiliary_dispatch(name: str, pool: AuxiliaryPoolSettings) -> DispatchConfig:
    """How requests reach its engines."""
    return DispatchConfig(
        pool=name,
        max_context_len=auxiliary_context_len(name, pool),
        vocab_size=_read(vocab_size, name, pool),
        max_inflight_per_engine=pool.max_num_seqs,
        # Requests have deadlines of their own, and waiting for a sleeping pool is not a failure.
        engine_timeout_s=pool.request_timeout_s,
        shares_memory=pool.mode == "colocated",
    )


def worker_pool_configs(config: TrainerConfig, folder: Path) -> dict[str, AuxiliaryPoolConfig]:
    """The pools' settings for rollout workers, by name; `folder` will have their tokenizers."""
    return {
        name: AuxiliaryPoolConfig(
            generator=_generator_name(name),
            tokenizer_path=str(tokenizer_path(folder, name)),
            chat_template_kwargs=pool.chat_template_kwargs,
            skip_special_tokens=config.rollout.skip_special_tokens,
            timeout_s=pool.request_timeout_s,
        )
        for name, pool in config.pools.items()
    }


def open_auxiliary_tokenizer(name: str, pool: AuxiliaryPoolSettings) -> ModelTokenizer:
    """The tokenizer of a pool's model. Raises DataError if there is none."""
    return _read(ModelTokenizer.open, name, pool)


def _generator_name(pool: str) -> str:
    return f"{pool}-generator"


def auxiliary_context_len(name: str, pool: AuxiliaryPoolSettings) -> int:
    """Longest prompt + answer in tokens."""
    return pool.max_context_len or _read(default_context_len, name, pool)


def auxiliary_model_config(name: str, pool: AuxiliaryPoolSettings) -> dict[str, Any]:
    """config.json of the pool's model. Raises DataError if there is none."""
    return _read(read_model_config, name, pool)


def _read(read: Callable[[Path], T], name: str, pool: AuxiliaryPoolSettings) -> T:
    """Reads a model directory; errors name the pool's setting."""
    try:
        return read(pool.model_path)
    except DataError as error:
        raise DataError(str(error).replace("model.path", path_setting(name))) from error


def path_setting(name: str) -> str:
    """Name of the setting that has the pool's model directory."""
    return f"pools.{name}.model_path"
