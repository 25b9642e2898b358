"""The ranks of a run, connected by torch.distributed and laid out on named axes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, TypeVar, cast

import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.errors import JobFailed, UmbraError
from umbra.trainer.world.world import pick_device, share_cores, usable_gpus

T = TypeVar("T")
_dist: Final[Any] = torch.distributed


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The ranks of a run, each with its own samples.

    Parameters and gradients are sharded along the axis "shard" of `fsdp`. With replicas (HSDP), its
    first axis "replicate" has ranks with the same shards. Sums of losses and metrics are over all
    ranks, `sum_over_ranks`.
    """

    rank: int
    world_size: int
    device: torch.device
    fsdp: DeviceMesh

    @property
    def is_lead(self) -> bool:
        """Rank 0 writes files and reports."""
        return self.rank == 0

    @classmethod
    @contextmanager
    def join(
        cls,
        environment: TorchrunEnvironment,
        device: Literal["auto", "cpu", "cuda"],
        timeout_s: float,
    ) -> Generator[Mesh]:
        """Connects this rank to the others; collective. Leaves the process group on exit.
        `timeout_s` limits a rank's wait for the others in a collective.

        On GPUs, open the session first: a supervisor that starts later inherits this rank's cores.
        """
        torch_device = pick_device(device, environment.local_rank)
        gpus = usable_gpus() if torch_device.type == "cuda" else ()
        share_cores(environment.local_rank, environment.local_world_size, gpus)
        backend = "cpu:gloo,cuda:nccl" if torch_device.type == "cuda" else "gloo"
        arguments: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s)}
        if torch_device.type == "cuda":
            torch.cuda.set_device(torch_device)
            # cuDNN's attention makes a plan for every shape, and packed shapes differ every step.
            torch.backends.cuda.enable_cudnn_sdp(False)
            arguments["device_id"] = torch_device
        if environment.under_torchrun:
            # torchrun's store outlives elastic restarts: without a prefix, a rank could read an
            # address from the previous incarnation.
            store, rank, world_size = next(_dist.rendezvous("env://"))
            store = _dist.PrefixStore(f"umbra-{environment.incarnation}", store)
            arguments |= {"store": store, "rank": rank, "world_size": world_size}
        else:
            arguments |= {"store": _dist.HashStore(), "rank": 0, "world_size": 1}
        _dist.init_process_group(backend, **arguments)
        try:
            yield cls.of_group(torch_device)
        finally:
            _dist.destroy_process_group()

    @classmethod
    def of_group(cls, device: torch.device, num_replicas: int = 1) -> Mesh:
        """Lays out the ranks of the process group. Collective."""
        rank, world_size = _dist.get_rank(), _dist.get_world_size()
        axes = {"replicate": num_replicas, "shard": world_size // num_replicas}
        if num_replicas == 1:
            del axes["replicate"]  # FSDP would sum gradients over it, one rank or not
        fsdp = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        return cls(rank=rank, world_size=world_size, device=device, fsdp=fsdp)


def from_lead(mesh: Mesh, make: Callable[[], T]) -> T:
    """Returns rank 0's `make()` on every rank. Collective. If it raises, every rank raises: the
    same UmbraError, or JobFailed for any other error. The value travels by torch.distributed's own
    object broadcast between the ranks of this job."""
    outcome: list[Any] = [None, None]
    if mesh.is_lead:
        try:
            outcome[0] = make()
        except UmbraError as error:
            outcome[1] = error
        except Exception as error:
            outcome[1] = JobFailed(f"rank 0 failed: {type(error).__name__}: {error}")
            _dist.broadcast_object_list(outcome, src=0)
            raise
    _dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise cast("UmbraError", outcome[1])
    return cast("T", outcome[0])
