"""Turns the settings of a pool into the specification that starts it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from umbra.runtime.actor.restart_policy import RestartPolicy
from umbra.runtime.cluster.placement import Plan
from umbra.runtime.engine_api.engine_names import engine_kind
from umbra.runtime.engine_api.lora_adapter import LoraAdapter
from umbra.runtime.pools.pool_settings import AuxiliaryPoolSettings, EnginePoolSettings
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.process.cpu_affinity import core_shares, cores_near, cpu_quota
from umbra.trainer.pool_placement import engine_device


def pool_spec(
    name: str,
    pool: EnginePoolSettings,
    plan: Plan,
    *,
    model_path: Path,
    dtype: str,
    device_type: str,
    max_context_len: int,
    **given: Any,
) -> PoolSpec:
    """A specification that takes each field of the same name from the settings.

    Args:
        plan: has the places of the engines, and the sizes of their KV caches.
        device_type: the trainer's.
        given: further fields of the specification; they override those of the settings.

    Raises:
        DataError: a LoRA adapter cannot be used with the model.
    """
    gpus = plan.engine_gpus(name)
    # Without an engine here, one has the cores that it would have on this node.
    threads_each = core_shares(cores_near([engine.own for engine in gpus] or [()]), cpu_quota())
    device = engine_device(pool, device_type)
    kwargs: dict[str, Any] = {
        "model_path": str(model_path.absolute()),
        "dtype": dtype,
        "device": device,
        "max_num_seqs": pool.max_num_seqs,
        "max_context_len": max_context_len,
        "kv_cache_num_tokens": plan.kv_num_tokens.get(name, pool.kv_cache_num_tokens),
        "tick_ms": pool.tick_ms,
        "num_threads": pool.num_threads or min(threads_each),
        **engine_kind(pool.engine).arguments(pool.engine_args),
    }
    if pool.lora_adapters:
        for adapter, path in pool.lora_adapters.items():
            LoraAdapter.read(adapter, path, model_path)
        kwargs["lora_adapters"] = {
            adapter: str(path.absolute()) for adapter, path in pool.lora_adapters.items()
        }
    section = f"pools.{name}" if isinstance(pool, AuxiliaryPoolSettings) else "pool"
    fields_of_spec: dict[str, Any] = {
        field.name: getattr(pool, field.name)
        for field in fields(PoolSpec)
        if hasattr(pool, field.name)
    }
    fields_of_spec |= {
        "name": name,
        "count": len(gpus),
        "num_gpus": plan.num_gpus[name],
        "kwargs": kwargs,
        "kwarg_settings": {key: f"{section}.engine_args.{key}" for key in pool.engine_args},
        "engine_gpus": gpus,
        "engine_nodes": tuple(place.node for place in plan.engines[name]),
        "engine_followers": plan.engine_followers(name),
        "restart": RestartPolicy(max_restarts=pool.max_restarts),
        "memory_limit_nbytes": pool.memory_limit_mib << 20,
    }
    return PoolSpec(**fields_of_spec | given)
