"""The ranks of a run: their devices, their axes, and what they agree on by torch.distributed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, TypeVar, cast

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from umbra.runtime.cluster.environment import TorchrunEnvironment, visible_gpus
from umbra.runtime.errors import ConfigError, JobFailed, UmbraError
from umbra.runtime.process.cpu_affinity import (
    allowed_threads,
    confine,
    core_shares,
    cores_near,
    cpu_quota,
)
from umbra.runtime.process.nvml import count_gpus

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
    timeout_s: float
    """Limit for a rank's wait for the others in a collective."""

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
            yield cls.of_group(torch_device, timeout_s=timeout_s)
        finally:
            _dist.destroy_process_group()

    @classmethod
    def of_group(
        cls, device: torch.device, num_replicas: int = 1, timeout_s: float = 1800.0
    ) -> Mesh:
        """Lays out the ranks of the process group. Collective."""
        rank, world_size = _dist.get_rank(), _dist.get_world_size()
        axes = {"replicate": num_replicas, "shard": world_size // num_replicas}
        if num_replicas == 1:
            del axes["replicate"]  # FSDP would sum gradients over it, one rank or not
        fsdp = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        return cls(rank=rank, world_size=world_size, device=device, fsdp=fsdp, timeout_s=timeout_s)

    def new_group(self) -> Any:
        """Another group of all ranks, on the CPU, for the collectives of a thread. Collective."""
        return _dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))


def from_lead(mesh: Mesh, make: Callable[[], T], group: Any = None) -> T:
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
            _dist.broadcast_object_list(outcome, src=0, group=group)
            raise
    _dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise cast("UmbraError", outcome[1])
    return cast("T", outcome[0])


def usable_gpus() -> tuple[str, ...]:
    """The GPUs that torch can use in this process, as CUDA_VISIBLE_DEVICES names them. Creates no
    context on them. Raises ConfigError if CUDA_VISIBLE_DEVICES names a GPU twice, or one that the
    machine does not have."""
    num_usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return visible_gpus(max(count_gpus(), num_usable))[:num_usable]


def pick_device(setting: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """This rank's device. Raises ConfigError if the setting is cuda, and there is no GPU. The plan
    of the job's GPUs checks that each rank has one."""
    has_gpus = torch.cuda.is_available()
    if setting == "cpu" or (setting == "auto" and not has_gpus):
        return torch.device("cpu")
    if not has_gpus:
        raise ConfigError("train.device = 'cuda': this node shows no GPU: use 'auto' or 'cpu'")
    return torch.device("cuda", local_rank)


def share_cores(local_rank: int, local_world_size: int, gpus: Sequence[str]) -> None:
    """Binds this rank to the cores near its GPU, the one of its local rank in `gpus` (none on the
    CPU). The ranks there share them and the container's CPU quota, since more threads than cores
    slow them down. A single rank has OMP_NUM_THREADS threads, if that is set.

    Denormal numbers are flushed to zero: gradients are full of them, and each costs a hundred times
    an ordinary multiplication on most CPUs.
    """
    cores = cores_near([gpus[rank : rank + 1] for rank in range(local_world_size)])
    confine(cores[local_rank])
    num_threads = core_shares(cores, cpu_quota())[local_rank]
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    # With several ranks torchrun sets it to 1, whatever the user wants.
    if local_world_size == 1 and wanted.isdigit() and int(wanted) > 0:
        num_threads = int(wanted)
    torch.set_num_threads(allowed_threads(num_threads))
    torch.set_flush_denormal(True)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sums in place. Collective; does nothing without a process group."""
    if _dist.is_initialized():
        _dist.all_reduce(values)
    return values


def max_over_ranks(values: Tensor) -> Tensor:
    """Takes the maximum in place. Collective; does nothing without a process group."""
    if _dist.is_initialized():
        _dist.all_reduce(values, op=_dist.ReduceOp.MAX)
    return values


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank. Collective."""
    vote = torch.tensor([int(flag)])
    return bool(sum_over_ranks(vote))


def agree_on_signal(received: signal.Signals | None) -> str:
    """The name of a signal that any rank has received, or "". Collective, because a signal may
    reach one rank alone, or ranks at different times."""
    number = int(max_over_ranks(torch.tensor(int(received or 0))))
    return signal.Signals(number).name if number else ""


def barrier() -> None:
    any_rank(False)


def from_each_rank(value: T, group: Any = None) -> list[T]:
    """The values of all ranks, by rank, by torch.distributed's own objects. Collective."""
    values: list[Any] = [value]
    if _dist.is_initialized():
        values = [None] * _dist.get_world_size()
        _dist.all_gather_object(values, value, group=group)
    return values


def first_text(text: str) -> str:
    """The text of the first rank whose text is not empty. Collective; one rank must have one."""
    if not _dist.is_initialized():
        return text
    source = -int(
        max_over_ranks(torch.tensor(-_dist.get_rank() if text else -_dist.get_world_size()))
    )
    found = [text]
    _dist.broadcast_object_list(found, src=source)
    return found[0]
