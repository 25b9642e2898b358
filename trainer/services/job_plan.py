"""Where a job's ranks and engines run, and how much memory they have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from umbra.runtime.cluster.memory_plan import MemoryPlan
from umbra.runtime.cluster.placement import Node, Plan
from umbra.runtime.errors import ConfigError
from umbra.runtime.process.nvml import gpu_sizes
from umbra.runtime.session.session import Session
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.services.memory_needs import plan_job_memory
from umbra.trainer.services.pool_placement import plan_pools
from umbra.trainer.services.services import POOL
from umbra.trainer.world.world import pick_device, usable_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """Every rank makes the same plan, so that all report the same error."""

    config: TrainerConfig  # with `train.activation_checkpointing` settled
    placement: Plan
    memory: MemoryPlan
    device_type: str  # of the ranks

    @classmethod
    def make(cls, config: TrainerConfig, session: Session, num_local_ranks: int) -> Self:
        """Raises ConfigError if a rank or an engine has no place, or a phase does not fit a GPU."""
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
        memory, chosen = plan_job_memory(config, POOL, placement, gpu_nbytes, device_type)
        train = replace(config.train, activation_checkpointing=chosen)
        return cls(
            config=replace(config, train=train),
            placement=replace(placement, kv_num_tokens=memory.kv_num_tokens),
            memory=memory,
            device_type=device_type,
        )
