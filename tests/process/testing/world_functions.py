"""Functions that the ranks of test_distributed_world.py run: importable by name."""

from __future__ import annotations

import os
import time

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray


def add_up(offset: int) -> float:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)  # pyright: ignore[reportUnknownMemberType]
    return total.item()


def double(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return values * 2


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} had enough")
    dist.barrier()  # pyright: ignore[reportUnknownMemberType]


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("about to die", flush=True)
        os.kill(os.getpid(), 9)
    dist.barrier()  # pyright: ignore[reportUnknownMemberType]


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.barrier()  # pyright: ignore[reportUnknownMemberType]


def return_a_tensor() -> torch.Tensor:
    return torch.zeros(2)
