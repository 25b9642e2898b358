"""A rank that holds shards and publishes them, in a process of a `DistributedWorld`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.rpc.sync_handle import LoopThread
from umbra.runtime.session.rollouts import SessionSync
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.supervisor.supervisor_main import supervisor_ref

SHAPES = {"uneven": (37, 300), "few_rows": (1, 7), "large": (2050, 515), "vector": (11,)}


def whole_tensors(version: int) -> dict[str, Tensor]:
    """What all ranks together publish as this version; the last tensor is not sharded."""
    generator = torch.Generator().manual_seed(version)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return tensors | {"scale": torch.tensor(float(version))}


@dataclass
class RemoteSession:
    """The part of a session that `SessionSync` needs, from any process of the node."""

    loop: LoopThread
    client: Client
    socket_dir: Path
    node_id: str

    def raise_if_lost(self) -> None:
        pass

    def lead_call(self, method: str, *args: object, timeout_s: float) -> Any:
        handle = self.client.handle(supervisor_ref(self.node_id, self.socket_dir))
        return self.loop.run(handle.call(method, *args, timeout_s=timeout_s))


class SyncFrom(SessionSync):
    """The calls of a rank that is on any node, over the lead's session.

    Args:
        node_id: of the rank's node.
    """

    def __init__(self, lead: Session, node_id: str) -> None:
        super().__init__(lead)
        self._node_id = node_id

    @property
    def node_id(self) -> str:
        return self._node_id


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
        remote = RemoteSession(loop, client, Path(socket_dir), node_ids[0])
        sync = SyncFrom(cast("Session", remote), node_ids[rank])
        made = WeightPublisher(sync, rank, mesh.size(), tensors, link_host="127.0.0.1")
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
