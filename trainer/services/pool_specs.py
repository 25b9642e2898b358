"""Turns the settings of pools into the specifications that start them and their processes."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy
from umbra.runtime.cluster.placement import Node, Plan, PoolRequest, plan_placement
from umbra.runtime.engine_api.engine_names import engine_kind
from umbra.runtime.engine_api.lora import read_adapter_rank
from umbra.runtime.engine_api.pool_settings import (
    AuxiliaryPoolSettings,
    EnginePoolSettings,
    PoolSettings,
)
from umbra.runtime.errors import ConfigError, DataError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.process.cpu_affinity import core_shares, cores_near, cpu_quota
from umbra.runtime.rollout.rollout_config import AuxiliaryPoolConfig, DispatchConfig
from umbra.runtime.text.model_files import (
    default_context_len,
    read_model_config,
    vocab_size,
    vocabulary,
)
from umbra.runtime.text.model_tokenizer import ModelTokenizer, tokenizer_path
from umbra.trainer.config.trainer_config import ServeConfig, TrainerConfig

T = TypeVar("T")
TEACHER: Final = "teacher"
"""The name of the pool that on-policy distillation asks."""
_BUSY_WAIT_S: Final = 10.0
"""Default of `max_wait_s` if the policy always has work, so that the judge gets its time."""


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
    """The specification that starts a pool: each field of the name of a setting takes its
    value, and `given` fields override these. `plan` has the places of the engines and the sizes
    of their KV caches; `device_type` is the trainer's. Raises DataError if a LoRA adapter does
    not fit the model."""
    gpus = plan.engine_gpus(name)
    # Without an engine here, one has the cores that it would have on this node.
    threads_each = core_shares(cores_near([engine.own for engine in gpus] or [()]), cpu_quota())
    device = engine_device(pool, device_type)
    kwargs: dict[str, Any] = {
        "model_path": str(model_path.absolute()),
        "dtype": dtype,
        "device": device,
        "max_num_seqs": pool.num_seqs,
        "max_context_len": max_context_len,
        "kv_cache_num_tokens": plan.kv_num_tokens.get(name, pool.kv_cache_num_tokens),
        "tick_ms": pool.tick_ms,
        "num_threads": pool.num_threads or min(threads_each),
        **engine_kind(pool.engine).arguments(pool.engine_args),
    }
    if pool.lora_adapters:
        for adapter, path in pool.lora_adapters.items():
            read_adapter_rank(adapter, path, model_path)
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


def auxiliary_pool_spec(
    name: str,
    config: TrainerConfig | ServeConfig,
    plan: Plan,
    device_type: str,
    host: str,
) -> PoolSpec:
    """The specification of one auxiliary pool. `host` is the policy's pool, whose GPUs colocated
    pools share. `device_type` is the trainer's."""
    pool = config.pools[name]
    is_colocated = pool.mode == "colocated"
    max_wait_s = pool.max_wait_s
    host_gets_idle = isinstance(config, TrainerConfig) and config.pool.mode == "hybrid"
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
        name=generator_name(name),
        target="umbra.runtime.rollout.dispatch.generator:GeneratorService",
        kwargs={"config": auxiliary_dispatch(name, config.pools[name])},
        role="rollout",
    )


def auxiliary_dispatch(name: str, pool: AuxiliaryPoolSettings) -> DispatchConfig:
    return DispatchConfig(
        pool=name,
        max_context_len=auxiliary_context_len(name, pool),
        vocab_size=_read(vocab_size, name, pool),
        max_running_per_engine=pool.num_seqs,
        max_inflight_per_engine=pool.max_inflight_per_engine,
        # Requests have deadlines of their own, and waiting for a sleeping pool is not a failure.
        engine_timeout_s=pool.request_timeout_s,
        shares_memory=pool.mode == "colocated",
    )


def worker_pool_configs(config: TrainerConfig, folder: Path) -> dict[str, AuxiliaryPoolConfig]:
    """The pools' settings for rollout workers, by name; `folder` will have their tokenizers."""
    return {
        name: AuxiliaryPoolConfig(
            generator=generator_name(name),
            tokenizer_path=str(tokenizer_path(folder, name)),
            chat_template_kwargs=pool.chat_template_kwargs,
            skip_special_tokens=config.rollout.skip_special_tokens,
            timeout_s=pool.request_timeout_s,
        )
        for name, pool in config.pools.items()
    }


def open_auxiliary_tokenizer(name: str, pool: AuxiliaryPoolSettings) -> ModelTokenizer:
    """Raises DataError if the pool's model has no tokenizer."""
    return _read(ModelTokenizer.open, name, pool)


def generator_name(pool: str) -> str:
    return f"{pool}-generator"


def auxiliary_context_len(name: str, pool: AuxiliaryPoolSettings) -> int:
    """Longest prompt + answer in tokens."""
    return pool.max_context_len or _read(default_context_len, name, pool)


def auxiliary_model_config(name: str, pool: AuxiliaryPoolSettings) -> dict[str, Any]:
    """config.json of the pool's model. Raises DataError if there is none."""
    return _read(read_model_config, name, pool)


def auxiliary_vocabulary(name: str, pool: AuxiliaryPoolSettings) -> dict[str, int]:
    """The id of each token of the pool's tokenizer."""
    return _read(vocabulary, name, pool)


def _read(read: Callable[[Path], T], name: str, pool: AuxiliaryPoolSettings) -> T:
    """Reads a model directory; errors name the pool's setting."""
    try:
        return read(pool.model_path)
    except DataError as error:
        raise DataError(str(error).replace("model.path", path_setting(name))) from error


def path_setting(name: str) -> str:
    """Name of the setting that has the pool's model directory."""
    return f"pools.{name}.model_path"


def plan_pools(
    config: TrainerConfig | ServeConfig,
    host: str,
    *,
    device_type: str,
    nodes: Sequence[Node],
    only: str = "",
) -> Plan:
    """Places the ranks and the engines of all pools. `host` is the policy's pool, `device_type`
    the trainer's, and `nodes` have the GPUs and the ranks, also those on the CPU. `only` names
    the pool that will run alone, and may use all GPUs. Raises ConfigError if a rank or an
    engine has no place."""
    pools: dict[str, PoolSettings | AuxiliaryPoolSettings] = {host: config.pool, **config.pools}
    requests = [
        PoolRequest(
            name=name,
            mode="standalone" if only else pool.mode,
            num_gpus=_num_gpus(
                _section(name, host), pool, device_type, has_gpus=all(node.gpus for node in nodes)
            ),
            count=None if pool.count == "auto" else pool.count,
            nodes=pool.nodes,
            gpus=pool.gpus,
            shares_with=host,
        )
        for name, pool in pools.items()
        if only in ("", name)
    ]
    if device_type != "cuda":
        nodes = [replace(node, num_ranks=0) for node in nodes]
    chosen = config.job.trainer_gpus_per_node
    for node in nodes:
        if node.num_ranks and chosen not in (None, node.num_ranks):
            raise ConfigError(
                f"job.trainer_gpus_per_node = {chosen}, and torchrun started {node.num_ranks} "
                f"ranks on a node: use a script of launch/, or --nproc-per-node {chosen}"
            )
    plan = plan_placement(nodes, requests)
    for name, places in plan.engines.items():
        if spread := {part.node for place in places if place.followers for part in place.parts}:
            addresses = [nodes[idx].address for idx in sorted(spread)]
            _check_spanning(_section(name, host), pools[name], addresses)
    return plan


def engine_device(pool: EnginePoolSettings, device_type: str) -> str:
    """The device type of a pool's engines. `device_type`: the trainer's."""
    return device_type if pool.device == "auto" else pool.device


def _check_spanning(
    section: str, pool: PoolSettings | AuxiliaryPoolSettings, addresses: Sequence[str]
) -> None:
    what = f"{section}: each of its engines needs several nodes"
    if not engine_kind(pool.engine).spans_nodes:
        raise ConfigError(
            f"{what}, and engine {pool.engine!r} cannot be on more than one: use engine 'vllm' or "
            "'sglang', or lower the tensor-parallel size"
        )
    if not pool.allow_engine_pickle:
        raise ConfigError(
            f"{what}, and {pool.engine}'s own connections between them unpickle what arrives, and "
            f"check no key: set {section}.allow_engine_pickle = true if you trust the network "
            "between the nodes, or lower the tensor-parallel size"
        )
    for address in addresses:
        if ":" in address:
            raise ConfigError(
                f"{what}, whose connections are IPv4, and {address} is an IPv6 address: set "
                "UMBRA_HOST_ADDRESS on every node to its IPv4 address in a private network"
            )
        if _is_public(address):
            raise ConfigError(
                f"{what}, whose connections check no key, and {address} is an address of the "
                "internet: set UMBRA_HOST_ADDRESS on every node to its address in a private network"
            )


def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:  # a name, which the user chose
        return False


def _section(name: str, host: str) -> str:
    return "pool" if name == host else f"pools.{name}"


def _num_gpus(section: str, pool: EnginePoolSettings, device_type: str, *, has_gpus: bool) -> int:
    """GPUs of one engine. Raises ConfigError if there are none, or they are chosen in two ways."""
    if engine_device(pool, device_type) == "cpu":
        return 0
    if not has_gpus:
        raise ConfigError(f"{section}.device = 'cuda': a node shows no GPU: use 'auto' or 'cpu'")
    if isinstance(pool, AuxiliaryPoolSettings) and "CUDA_VISIBLE_DEVICES" in pool.env:
        raise ConfigError(
            f"{section}.env sets CUDA_VISIBLE_DEVICES, and umbra does, too: choose the GPUs by "
            f"{section}.gpus"
        )
    return engine_kind(pool.engine).tensor_parallel_size(pool.engine_args, section)
