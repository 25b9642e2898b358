from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import replace

from umbra.runtime.cluster.placement import Node, Plan, PoolRequest, plan_placement
from umbra.runtime.engine_api.engine_names import engine_kind
from umbra.runtime.engine_api.pool_settings import (
    AuxiliaryPoolSettings,
    EnginePoolSettings,
    PoolSettings,
)
from umbra.runtime.errors import ConfigError
from umbra.trainer.config.trainer_config import ServeConfig, TrainerConfig


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
