"""torch.distributed for the trainer: the ranks, their devices, and what they agree on."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeVar

import torch
import torch.distributed
from torch import Tensor

from umbra.runtime.cluster.environment import visible_gpus
from umbra.runtime.errors import ConfigError
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
    """Keeps this rank on the cores near its GPU, the one of its local rank in `gpus` (none on the
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


def from_each_rank(value: T) -> list[T]:
    """The values of all ranks, by rank, by torch.distributed's own objects. Collective."""
    values: list[Any] = [value]
    if _dist.is_initialized():
        values = [None] * _dist.get_world_size()
        _dist.all_gather_object(values, value)
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
