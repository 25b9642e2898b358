"""A rank that holds shards and publishes them, in a process of a `DistributedWorld`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from umbra.runtime.cluster.run_requests import supervisor_ref
from umbra.runtime.cluster.socket_dir import FD_SOCKET
from umbra.runtime.rpc.rpc_client import Client, Handle
from umbra.runtime.rpc.sync_handle import LoopThread
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.weights.sync_messages import Answer, SyncMessage, decode_answer, encode

SHAPES = {"uneven": (37, 300), "few_rows": (1, 7), "large": (2050, 515), "vector": (11,)}


def whole_tensors(version: int) -> dict[str, Tensor]:
    """What all ranks together publish as this version; the last tensor is not sharded."""
    generator = torch.Generator().manual_seed(version)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return tensors | {"scale": torch.tensor(float(version))}


@dataclass
class RemoteRank:
    """A rank on any node, as its `WeightPublisher` sees its session, in any process of the lead's
    node. `handle` is the lead."""

    loop: LoopThread
    handle: Handle
    rank: int
    world_size: int
    node_id: str
    fd_socket: str
    tcp_host: str = "127.0.0.1"

    def raise_if_lost(self) -> None:
        pass

    def sync(self, message: SyncMessage[Answer]) -> Answer:
        call = self.handle.call("sync", encode(message), timeout_s=message.left_s)
        return decode_answer(message, self.loop.run(call))


def publish_shards(socket_dir: str, node_ids: list[str], versions: list[int]) -> list[str]:
    """Publishes every version to the pool "policy"; returns the transport of each.

    Args:
        node_ids: of each rank. The first is that of the supervisor at `socket_dir`.
    """
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rank = torch.distributed.get_rank()
    tensors = {
        name: tensor if name == "scale" else distribute_tensor(tensor, mesh, [Shard(0)])
        for name, tensor in whole_tensors(versions[0]).items()
    }
    with LoopThread("rank") as loop:
        client = Client(node_ids[0])
        loop.run(client.__aenter__())
        lead = client.handle(supervisor_ref(node_ids[0], Path(socket_dir)))
        fd_socket = str(Path(socket_dir) / FD_SOCKET)
        remote = RemoteRank(loop, lead, rank, mesh.size(), node_ids[rank], fd_socket)
        made = WeightPublisher(remote, tensors)
        try:
            with closing(made) as publisher:
                transports: list[str] = []
                for version in versions:
                    for name, whole in whole_tensors(version).items():
                        part = (
                            whole if name == "scale" else distribute_tensor(whole, mesh, [Shard(0)])
                        )
                        tensors[name].copy_(part)
                    transports.append(publisher.publish("policy", version, 40.0).transport)
        finally:
            loop.run(client.__aexit__(None, None, None))
    return transports
