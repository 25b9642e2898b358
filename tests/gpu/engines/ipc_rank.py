"""A rank in a process of its own, with memory of its own on the GPU: `python ipc_rank.py FD ...`.

The test's end is in `ipc_pool`. Both talk over one connection: commands to the rank, and, while it
publishes, its calls to the supervisor, which runs in the test.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from adapter_factory import read_adapter
from model_factory import make_model
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from umbra.runtime.engine_api.lora import LoraSpec
from umbra.runtime.errors import WeightSyncError
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.weights.shards import wire_manifest
from umbra.runtime.weights.sync_messages import Answer, SyncMessage

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def mixed_tensors(seed: int) -> dict[str, Tensor]:
    """Float32 and others; two in one storage, one transposed, large and tiny ones."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(1000, 33, generator=generator)
    return {
        "first": shared[:300],
        "second": shared[300:],
        "transposed": torch.randn(70, 90, generator=generator).t(),
        "large": torch.randn(4000, 1500, generator=generator),
        "ids": torch.arange(seed, seed + 777),
        "scalar": torch.tensor(3.5 + seed),
        "one row": torch.randn(1, 50, generator=generator),
    }


def model_tensors(kind: str, seed: int) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in make_model(kind, seed).named_parameters()}


def uniform_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: torch.full(shape, 0.5, device=DEVICE) for name, shape in shapes.items()}


@dataclass
class TestSession:
    """A rank's `SyncSession`, by way of the test."""

    __test__ = False
    connection: Connection
    rank: int
    world_size: int
    fd_socket: str
    node_id: str = "here"
    tcp_host: str = "127.0.0.1"

    def raise_if_lost(self) -> None:
        pass

    def sync(self, message: SyncMessage[Answer]) -> Answer:
        self.connection.send(("call", message))
        kind, value = self.connection.recv()
        if kind == "failed":
            raise WeightSyncError(value)
        return value


class Rank:
    """Carries out the test's commands."""

    def __init__(
        self, connection: Connection, rank: int, world_size: int, store: str, fd_socket: str
    ) -> None:
        self._session = TestSession(connection, rank, world_size, fd_socket)
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._tensors: dict[str, Tensor] = {}
        self._publisher: WeightPublisher | None = None
        self._mesh: DeviceMesh | None = None
        torch.zeros(1, device=DEVICE)

    def make(self, kind: str, seed: int, wire: str | None, is_sharded: bool = False) -> None:
        """Makes "mixed" tensors, or those of a model, on its GPU; of sharded ones its own rows."""
        tensors = mixed_tensors(seed) if kind == "mixed" else model_tensors(kind, seed)
        self._take(tensors, wire, is_sharded)

    def read(self, folder: str) -> None:
        """Takes a checkpoint with its dtypes, in the memory of the one before if there is one."""
        tensors = load_file(Path(folder) / "model.safetensors")
        if self._tensors.keys() != tensors.keys():
            self._take({name: tensor.clone() for name, tensor in tensors.items()}, None, False)
            return
        for name, tensor in tensors.items():
            self._tensors[name].copy_(tensor)

    def make_adapter(self, folder: str) -> None:
        """Makes the matrices of a LoRA adapter, on its GPU."""
        tensors, spec = read_adapter(Path(folder))
        self._take(tensors, None, False, lora=spec)

    def make_uniform(
        self, shapes: dict[str, tuple[int, ...]], wire: str | None, keeps_memory: bool = True
    ) -> None:
        self._take(uniform_tensors(shapes), wire, False, keeps_memory)

    def _take(
        self,
        tensors: dict[str, Tensor],
        wire: str | None,
        is_sharded: bool,
        keeps_memory: bool = True,
        lora: LoraSpec | None = None,
    ) -> None:
        if is_sharded:
            self._tensors = {name: self._shard(tensor) for name, tensor in tensors.items()}
        else:
            self._tensors = _to_device(tensors)
        dtype = None if wire is None else getattr(torch, wire)
        self._publisher = WeightPublisher(
            self._session,
            self._tensors,
            wire_manifest(self._tensors, dtype, lora=lora),
            keeps_memory=keeps_memory,
        )

    def negate(self) -> None:
        """The next version of the weights; left to run on the GPU."""
        for tensor in self._tensors.values():
            tensor.detach().neg_()

    def move(self, name: str) -> bool:
        """Frees a tensor's memory and gives it new one with the same contents. Returns whether that
        has the address of the old one."""
        tensor = self._tensors[name]
        values, address = tensor.detach().cpu(), tensor.data_ptr()
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=DEVICE)
        gc.collect()
        torch.cuda.empty_cache()
        tensor.data = values.to(DEVICE)
        return tensor.data_ptr() == address

    def publish(self, version: int, error: str | None) -> dict[str, Any]:
        """
        Args:
            error: raised as soon as its memory has been read.
        """
        assert self._publisher is not None

        def fail() -> None:
            if error is not None:
                raise RuntimeError(error)

        begun_at = time.perf_counter()
        report = self._publisher.publish("pool", version, 60.0, fail)
        return {
            "transport": report.transport,
            "network_nbytes": report.network_nbytes,
            "engines": dict(report.engines),
            "failed": dict(report.failed),
            "wall_s": time.perf_counter() - begun_at,
        }

    def release(self) -> None:
        """Gives all its memory on the GPU back but that of CUDA itself."""
        assert self._publisher is not None
        self._publisher.close()
        self._publisher, self._tensors = None, {}
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()

    def pid(self) -> int:
        return os.getpid()

    def _shard(self, tensor: Tensor) -> Tensor:
        if self._mesh is None:
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{self._store}",
                rank=self._rank,
                world_size=self._world_size,
            )
            self._mesh = init_device_mesh(DEVICE, (self._world_size,))
        if tensor.ndim == 0:
            return tensor.to(DEVICE)
        rows = tensor.chunk(self._world_size)
        own = rows[self._rank] if self._rank < len(rows) else tensor[:0]
        return DTensor.from_local(
            own.to(DEVICE).contiguous(),
            self._mesh,
            [Shard(0)],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.contiguous().stride(),
        )


def _to_device(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keeps strides and shared storages."""
    storages: dict[int, Tensor] = {}
    moved: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        key = tensor.untyped_storage().data_ptr()
        if key not in storages:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            whole.set_(tensor.untyped_storage())  # pyright: ignore[reportUnknownMemberType]
            storages[key] = whole.to(DEVICE)
        moved[name] = storages[key].as_strided(
            tensor.shape, tensor.stride(), tensor.storage_offset()
        )
    return moved


def main() -> None:
    fd, rank, world_size, store, fd_socket = sys.argv[1:]
    connection = Connection(int(fd))
    server = Rank(connection, int(rank), int(world_size), store, fd_socket)
    connection.send(("done", None))
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            break
        try:
            connection.send(("done", getattr(server, method)(*arguments)))
        except Exception:  # noqa: BLE001 - the test's to see
            connection.send(("failed", traceback.format_exc()))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
