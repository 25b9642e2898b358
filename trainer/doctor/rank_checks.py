"""The checks of `umbra doctor` that concern GPUs, and the ranks of several processes and nodes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgpack
import torch
import torch.distributed

from umbra.runtime.cluster.environment import (
    TorchrunEnvironment,
    secret_file,
    socket_root,
    without_rank,
)
from umbra.runtime.cluster.job_nodes import (
    JobNode,
    check_several_nodes,
    job_name,
    key_digest,
    meet_nodes,
    own_address,
)
from umbra.runtime.cluster.socket_dir import FD_SOCKET, SocketDir
from umbra.runtime.engine_api.pool_settings import allowed_transports
from umbra.runtime.errors import ConfigError, JobFailed
from umbra.runtime.process.nvml import gpu_sizes
from umbra.runtime.rpc.curve_keys import CurveKeys
from umbra.runtime.rpc.loop_socket import endpoint_at, split_endpoint
from umbra.runtime.weights.exports.ipc_memory import MemoryExporter, probe_import
from umbra.runtime.weights.image.fd_server import serve_fds
from umbra.runtime.weights.rank_exports import RankExports
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.doctor.node_checks import NotApplicable, listen
from umbra.trainer.world.mesh import pick_device, usable_gpus

_dist: Final[Any] = torch.distributed

MEETING_LIMIT_S: Final = 60.0
"""Longest wait for the other nodes and ranks. A longer one delays the report of one that is
missing; with a shorter one, a slow file system looks like a missing node."""
_CHILD_LIMIT_S: Final = 120.0
"""For the child to import torch and read the memory."""
_CONNECT_LIMIT_S: Final = 5.0
_MAX_SKEW_S: Final = 1.0
"""Between clocks. With more, logs and ledgers of different nodes cannot be read together."""


def check_cuda_ipc(config: TrainerConfig, gpus: Sequence[int]) -> str:
    """Exports memory of this process's GPUs, and reads it in a child, as engines do. Raises
    ConfigError if it cannot be read, NotApplicable if the run would not do that."""
    tensors = [(gpu, _tensor_on(config, gpu)) for gpu in gpus]
    job, node = f"doctor-ipc-{os.getpid()}", socket.gethostname()
    with SocketDir.create(job, node, socket_root()) as folder:
        problem = asyncio.run(_find_problem(tensors, str(folder.path / FD_SOCKET)))
    names = f"GPU {', '.join(map(str, gpus))}"
    if problem and config.pool.transport == "auto":
        raise NotApplicable(
            f"another process cannot read memory of {names}: {problem}. Weights go through host "
            "memory, which is slower, unless the container is started with --ipc=host"
        )
    if problem:
        raise ConfigError(
            f"another process cannot read memory of {names}: {problem}; start the container with "
            "--ipc=host, or set pool.transport = 'auto', which falls back to host memory"
        )
    return f"another process can read memory of {names}"


async def _find_problem(tensors: Sequence[tuple[int, torch.Tensor]], fd_socket: str) -> str:
    """Why another process cannot read these tensors, or "". Serves descriptors meanwhile, as a
    supervisor does."""

    def export_and_read() -> str:
        exporter = MemoryExporter(fd_socket)
        try:
            exports = exporter.export(tensors)
            return _read_elsewhere(exports) if isinstance(exports, RankExports) else exports
        finally:
            exporter.release()

    async with serve_fds(fd_socket):
        return await asyncio.to_thread(export_and_read)


def _read_elsewhere(exports: RankExports) -> str:
    raw = [allocation.to_wire() for allocation in exports.allocations]
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__],
            input=msgpack.packb(raw),
            capture_output=True,
            env=without_rank(os.environ),
            timeout=_CHILD_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {_CHILD_LIMIT_S:g} s"
    lines = (child.stdout if child.returncode == 0 else child.stderr).decode().splitlines()
    return lines[-1] if lines else f"its process ended with status {child.returncode}"


def check_peer_access(config: TrainerConfig) -> str:
    """Copies between all pairs of GPUs of this process. Raises ConfigError if a copy arrives
    damaged, NotApplicable without access or need."""
    num_gpus = max(1, len(usable_gpus()))
    tensors = [_tensor_on(config, gpu) for gpu in range(num_gpus)]
    if num_gpus == 1:
        raise NotApplicable("one GPU here")
    for one, tensor in enumerate(tensors):
        for other in range(num_gpus):
            if one == other:
                continue
            if not torch.cuda.can_device_access_peer(one, other):
                raise NotApplicable(
                    f"GPU {one} cannot access GPU {other}. Copies between them go through host "
                    "memory, which is slower, unless the IOMMU and PCIe's ACS are switched off"
                )
            if not torch.equal(tensor.to(f"cuda:{other}").cpu(), tensor.cpu()):
                raise ConfigError(
                    f"a copy from GPU {one} to GPU {other} arrives damaged: switch the IOMMU or "
                    "PCIe's ACS off (NCCL's guide calls that its troubleshooting of P2P)"
                )
    return f"between all {num_gpus} GPUs"


def _tensor_on(config: TrainerConfig, gpu: int) -> torch.Tensor:
    device, transport = pick_device(config.train.device, gpu), config.pool.transport
    if device.type == "cpu":
        raise NotApplicable(
            "the trainer is on the CPU" if torch.cuda.is_available() else "no GPU here"
        )
    if not any(t.reads_ranks for t in allowed_transports(transport)):
        raise NotApplicable(f"pool.transport = {transport!r} does not use it")
    return torch.arange(1 << 20, dtype=torch.int32, device=device)


@contextlib.contextmanager
def nodes_met(environment: TorchrunEnvironment, run_dir: Path) -> Generator[tuple[JobNode, ...]]:
    """Within the block, local rank 0 of each node listens on its address. Raises
    as `meet_nodes`."""
    check_several_nodes(environment)
    address = own_address(*environment.meeting_point)
    gpus = usable_gpus()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(listen(address))
        keys = stack.enter_context(_shared_keys(secret_file(f"{job_name(environment)}-doctor")))
        me = JobNode(
            node_id=f"{socket.gethostname()}-{os.getpid()}",
            num_ranks=environment.local_world_size,
            gpus=gpus,
            gpu_nbytes=tuple(gpu_sizes(gpus)),
            tcp_endpoint=endpoint_at(address, server.getsockname()[1]),
            key_digest=key_digest(keys),
        )
        yield meet_nodes(environment, me, run_dir, MEETING_LIMIT_S)


@contextlib.contextmanager
def _shared_keys(path: Path) -> Generator[CurveKeys]:
    """Keys that the first of the nodes writes, and removes after the block."""
    is_own = not path.exists()
    if is_own:
        try:
            CurveKeys.generate().save(path)
        except FileExistsError:  # another node was faster
            is_own = False
    try:
        yield CurveKeys.load(path)
    finally:
        if is_own:
            path.unlink(missing_ok=True)


def check_connections(nodes: Sequence[JobNode]) -> str:
    """Connects to all nodes, while they listen. Raises ConfigError if one cannot be reached."""
    for idx, node in enumerate(nodes):
        host, port = split_endpoint(node.tcp_endpoint)
        try:
            socket.create_connection((host, int(port)), _CONNECT_LIMIT_S).close()
        except OSError as error:
            raise ConfigError(
                f"node {idx} cannot be reached at {host}, port {port}: {error}; open all ports "
                "between the nodes, or set UMBRA_HOST_ADDRESS there to the address of another "
                "network"
            ) from error
    return f"reaches all {len(nodes)} nodes"


def check_clocks(world_size: int) -> str:
    """Compares the ranks' clocks; collective."""
    clock = torch.tensor([time.time()], dtype=torch.float64)
    clocks = [torch.zeros_like(clock) for _ in range(world_size)]
    _dist.barrier()
    clock[0] = time.time()
    _dist.all_gather(clocks, clock)
    times = [float(other) for other in clocks]
    skew_s = max(times) - min(times)
    if skew_s > _MAX_SKEW_S:
        raise ConfigError(
            f"the clock of rank {times.index(min(times))} is {skew_s:.1f} s behind that of rank "
            f"{times.index(max(times))}: run NTP or chrony on all nodes"
        )
    return f"within {skew_s:.3f} s" if world_size > 1 else "one rank"


def check_nccl(config: TrainerConfig, environment: TorchrunEnvironment) -> str:
    """Adds numbers over all ranks on their GPUs; collective."""
    device, world_size = (
        pick_device(config.train.device, environment.local_rank),
        environment.world_size,
    )
    if device.type == "cpu":
        raise NotApplicable("the ranks are on CPUs, and have met by gloo")
    torch.cuda.set_device(device)
    group = _dist.new_group(backend="nccl", timeout=timedelta(seconds=MEETING_LIMIT_S))
    numbers = torch.ones(1 << 24, device=device)
    _dist.all_reduce(numbers, group=group)  # connects
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    _dist.all_reduce(numbers, group=group)
    torch.cuda.synchronize(device)
    taken_s = time.perf_counter() - begin
    if not bool((numbers == world_size**2).all()):
        raise JobFailed("NCCL added numbers of all ranks wrongly: see NCCL_DEBUG=INFO")
    _dist.destroy_process_group(group)
    rate = numbers.nbytes * 2 * (world_size - 1) / world_size / taken_s / 1e9
    return f"adds 64 MiB over {world_size} ranks at {rate:.1f} GB/s"


def _read_memory() -> None:
    print(probe_import(msgpack.unpackb(sys.stdin.buffer.read())))


if __name__ == "__main__":
    _read_memory()
