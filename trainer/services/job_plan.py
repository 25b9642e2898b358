from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Final, Self

from umbra.runtime.cluster.memory_plan import MemoryPlan
from umbra.runtime.cluster.placement import Node, Plan
from umbra.runtime.errors import ConfigError
from umbra.runtime.process.nvml import gpu_sizes
from umbra.runtime.session.session import Session
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.services.memory_needs import check_host_memory, plan_job_memory
from umbra.trainer.services.pool_specs import plan_pools
from umbra.trainer.services.services import POOL
from umbra.trainer.world.mesh import pick_device, usable_gpus

logger = logging.getLogger(__name__)

_LEAST_S: Final = 1800.0
"""Least timeout of a collective. Ranks that fail end the others through the session long before,
so it is for a network that drops packets. Less is too short for a rank that slowly reads its data
or writes the model."""
_MARGIN_S: Final = 240.0
"""A wait may take this much longer than its setting: by the margins of calls, and with auxiliary
pools, by starting the process that handles their requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """Every rank makes the same plan, so that all report the same error."""

    config: TrainerConfig  # with the settings that the memory plan chooses
    placement: Plan
    memory: MemoryPlan
    device_type: str  # of the ranks

    @classmethod
    def make(cls, config: TrainerConfig, session: Session, num_local_ranks: int) -> Self:
        """Raises ConfigError if a rank or an engine has no place, or a phase does not fit a GPU.
        Warns on each host whose memory is short: a virtual machine may get more as it is used."""
        if config.pool.count == 0 and not session.tcp_host:
            raise ConfigError(
                "pool.count = 0 leaves the engines to machines that join, and this job listens on "
                "no address: set UMBRA_HOST_ADDRESS to that of this host"
            )
        device_type = pick_device(config.train.device, session.local_rank).type
        nodes = [
            Node(gpus=node.gpus, num_ranks=node.num_ranks, address=node.address)
            for node in session.nodes
        ] or [Node(gpus=usable_gpus(), num_ranks=num_local_ranks)]
        placement = plan_pools(config, POOL, device_type=device_type, nodes=nodes)
        gpu_nbytes = [node.gpu_nbytes for node in session.nodes]
        gpu_nbytes = gpu_nbytes or [gpu_sizes(placement.nodes[0].gpus)]
        memory, config = plan_job_memory(config, POOL, placement, gpu_nbytes, device_type)
        if memory.expected_nbytes and placement.ranks:
            try:
                check_host_memory(config, len(placement.ranks), num_local_ranks)
            except ConfigError as error:
                if session.local_rank == 0:
                    logger.warning("%s", error)
        return cls(
            config=config,
            placement=replace(placement, kv_num_tokens=memory.kv_num_tokens),
            memory=memory,
            device_type=device_type,
        )


def collective_timeout_s(config: TrainerConfig) -> float:
    """The timeout of the ranks' process group in seconds.

    torch ends a rank, and with it the run, if a collective takes longer than the process group's
    timeout. Waits that a setting allows must not end like that:

       pool.sync_timeout_s             rank 0 waits for the first start of the engines, and for the
       pools.NAME.start_timeout_s      manager to begin; pools that share memory start one by one
       rollout.timeout_s               a rank that did not get an answer, because the manager was
                                       killed, asks again; the others have it and wait for this rank

    All other waits of a single rank are shorter than the least timeout, or have no limit. Waits of
    all ranks outside torch (for a weight sync or a batch) do not count.
    """
    in_turn_s = config.pool.sync_timeout_s + _MARGIN_S
    waits_s = [_LEAST_S, config.rollout.timeout_s + _MARGIN_S]
    for pool in config.pools.values():
        start_s = pool.start_timeout_s + _MARGIN_S
        if pool.mode == "colocated":
            in_turn_s += start_s
        else:
            waits_s.append(start_s)
    return max(in_turn_s, *waits_s)
