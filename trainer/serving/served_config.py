"""Reads what a config serves: its pools of engines, and the models that clients can name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from umbra.runtime.cluster.placement import Node, Plan
from umbra.runtime.engine_api.pool_settings import EnginePoolSettings
from umbra.runtime.engine_api.weight_files import snapshot_name
from umbra.runtime.errors import ConfigError, DataError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rollout.rollout_config import DispatchConfig
from umbra.runtime.text.model_files import read_model_config, vocab_size
from umbra.trainer.checkpoint.run_dir import RunDir
from umbra.trainer.config.config_file import check_config, read_config
from umbra.trainer.config.trainer_config import ServeConfig
from umbra.trainer.data.hub_paths import model_name, with_local_models
from umbra.trainer.services.chosen_settings import with_chosen_settings
from umbra.trainer.services.pool_specs import (
    auxiliary_dispatch,
    auxiliary_pool_spec,
    engine_device,
    path_setting,
    plan_pools,
)
from umbra.trainer.services.services import POOL, engine_pool_spec, max_context_len
from umbra.trainer.serving.served_pool import ServedPoolConfig


def read_serve_config(source: str, overrides: Sequence[str]) -> ServeConfig:
    """Reads a config file, or makes a config for a model directory or a model of the hub, which is
    downloaded. Raises ConfigError for wrong settings, DataError for a failed download."""
    path = Path(source)
    if path.is_dir() or (path.suffix != ".toml" and model_name(path)):
        values = {"model": {"path": source}}
        config = check_config(ServeConfig, values, source, overrides)
    else:
        config = read_config(ServeConfig, path, overrides)
    return with_chosen_settings(with_local_models(config))[0]


def read_one_engine_config(
    source: str, overrides: Sequence[str], name: str | None, engine: str | None
) -> tuple[ServeConfig, ServedPoolConfig]:
    """A config for one engine of the named pool (None: the policy's), of another kind if given."""
    pool = _find_pool(read_serve_config(source, overrides), name)
    more = [f"{pool.section}.count=1", "pool.staged_updates=false", "pool.sleep=auto"]
    if engine:
        more.append(f"{pool.section}.engine={engine}")
    return read_serve_config(source, [*overrides, *more]), pool


def served_pools(config: ServeConfig) -> list[ServedPoolConfig]:
    """The policy's pool and the auxiliary pools. Raises ConfigError if two models or LoRA adapters
    have the same name, DataError if a path is not a model directory."""
    pools = [_policy(config), *(_auxiliary(config, name) for name in config.pools)]
    sections: dict[str, str] = {}
    for pool in pools:
        for name in pool.names:
            if name in sections:
                raise ConfigError(_name_conflict(name, sections[name], pool.section))
            sections[name] = pool.section
    return pools


def _name_conflict(name: str, first: str, second: str) -> str:
    whose = f"[{first}] has two models"
    if second != first:
        whose = f"[{first}] and [{second}] both have a model"
    return (
        f"{whose} {name!r} for clients to ask for (the policy is called 'policy' and as its "
        "directory, a pool of [pools] as the pool, an adapter by its own name): rename one of them"
    )


def trained_instead(config: ServeConfig) -> Path | None:
    """The trained model of the config's run, if another one is served."""
    export = RunDir(config.run.dir).export
    is_other = export.exists() and export.resolve() != config.model.path.resolve()
    return export if is_other else None


def plan_served(config: ServeConfig, *, only: str = "") -> Plan:
    """The places of the engines of all pools, or of the only one that will run. Raises ConfigError
    if an engine has no place."""
    device_type, gpus = _device_type(config), tuple[str, ...]()
    if any(engine_device(pool, device_type) == "cuda" for pool in _pools(config)):
        from umbra.trainer.world.mesh import usable_gpus  # imports torch

        gpus = usable_gpus()
    return plan_pools(
        config, POOL, device_type=device_type, nodes=[Node(gpus=gpus, num_ranks=0)], only=only
    )


def pool_specs(config: ServeConfig, plan: Plan) -> list[PoolSpec]:
    """Pools that share memory are time-sliced."""
    device_type = _device_type(config)
    specs = [
        auxiliary_pool_spec(name, config, plan, device_type, POOL)
        for name in config.pools
        if name in plan.engines
    ]
    if POOL in plan.engines:
        specs.append(engine_pool_spec(config, plan, device_type, load_weights=True))
    return specs


def alone(config: ServeConfig, pool: str) -> PoolSpec:
    """The specification of a pool that shares its memory with no other."""
    (spec,) = pool_specs(config, plan_served(config, only=pool))
    return replace(spec, mode="standalone", shares_with="", max_wait_s=None)


def _find_pool(config: ServeConfig, name: str | None) -> ServedPoolConfig:
    """The pool with this name, its own or its model's; None for the policy's."""
    pools = served_pools(config)
    if name is None:
        return pools[0]
    for pool in pools:
        if name in (pool.pool, pool.model):
            return pool
    known = ", ".join(repr(pool.pool) for pool in pools)
    raise ConfigError(f"there is no pool {name!r} in this config; there are: {known}")


def _policy(config: ServeConfig) -> ServedPoolConfig:
    turns_s = [pool.max_turn_s for pool in config.pools.values() if pool.mode == "colocated"]
    dispatch = DispatchConfig(
        pool=POOL,
        max_context_len=max_context_len(config),
        vocab_size=vocab_size(config.model.path),
        max_running_per_engine=config.pool.num_seqs,
        max_inflight_per_engine=config.pool.max_inflight_per_engine,
        # It waits while at most one other pool is awake.
        engine_timeout_s=config.pool.sync_timeout_s + max(turns_s, default=0.0),
        shares_memory=bool(turns_s),
    )
    return ServedPoolConfig(
        model=snapshot_name(config.model.path) or config.model.path.absolute().name,
        model_path=str(config.model.path.absolute()),
        section="pool",
        path_setting="model.path",
        dispatch=dispatch,
        adapters=list(config.pool.lora_adapters),
        extra_stop_ids=config.rollout.stop_token_ids,
        stops=config.rollout.stop,
        template_variables=config.data.chat_template_kwargs if config.data else {},
        trust_remote_code=config.model.trust_remote_code,
    )


def _auxiliary(config: ServeConfig, name: str) -> ServedPoolConfig:
    pool = config.pools[name]
    try:
        read_model_config(pool.model_path)
    except DataError as error:
        raise DataError(str(error).replace("model.path", path_setting(name))) from error
    return ServedPoolConfig(
        model=name,
        model_path=str(pool.model_path.absolute()),
        section=f"pools.{name}",
        path_setting=path_setting(name),
        dispatch=auxiliary_dispatch(name, pool),
        adapters=list(pool.lora_adapters),
        template_variables=pool.chat_template_kwargs,
    )


def _pools(config: ServeConfig) -> list[EnginePoolSettings]:
    return [config.pool, *config.pools.values()]


def _device_type(config: ServeConfig) -> str:
    if all(pool.device != "auto" for pool in _pools(config)):
        return config.pool.device
    from umbra.trainer.world.mesh import pick_device  # imports torch, which finds GPUs

    return pick_device("auto" if config.train is None else config.train.device, 0).type
