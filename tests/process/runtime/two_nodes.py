"""A job of two nodes with real engines, as the tests of weights between nodes have it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from joined_node import JoinedNode
from pools_in_turn import RESTART, wait_until
from torch import Tensor

from umbra.engines.echo.echo_engine import weights_fingerprint
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.session import Session
from umbra.runtime.testing.factories import SessionFactory
from umbra.runtime.weights.shards import flatten

NEAR, FAR = ["policy-0", "policy-1"], ["policy-2", "policy-3"]


class TwoNodes:
    """A job of one node and a machine that only generates, with two engines each. The first one of
    FAR receives for its node."""

    def __init__(self, lead: Session, far: JoinedNode, full_sync_every: int) -> None:
        self.lead = lead
        far.wait_for_text("joined as node 1")
        self._far = far
        spec = PoolSpec(
            name="policy",
            engine="echo",
            count=3,
            engine_nodes=(0, 0, 1),  # and one that the machine adds
            mode="standalone",
            kwargs={"verify_checksums": True, "weights_in_logprobs": True},
            restart=RESTART,
            full_sync_every=full_sync_every,
        )
        lead.create_pool(spec)
        for name in [*NEAR, *FAR]:
            wait_until(lambda name=name: self.state(name) == "PENDING_WEIGHTS")

    @property
    def node_ids(self) -> tuple[str, str]:
        return self.lead.node_id, self._row(FAR[0])["ref"].node_id

    def state(self, name: str) -> str:
        return str(self._row(name)["state"])

    def incarnation(self, name: str) -> int:
        return int(self._row(name)["incarnation"])

    def pid(self, name: str) -> int:
        """Of an engine on the far node."""
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in self._far.tree()}
        return next(pid for pid, command in commands.items() if f"{name}#" in command)

    def fingerprints(self) -> list[int]:
        """Of each engine's weights."""
        names = [row["engine"] for row in self.lead.pool("policy").states()]
        return [self.engine(name).call("weights_fingerprint") for name in names]

    def engine(self, name: str) -> SyncHandle:
        return self.lead.connect(self._row(name)["ref"])

    def _row(self, name: str) -> dict[str, Any]:
        rows = self.lead.pool("policy").states()
        return next((row for row in rows if row["engine"] == name), {"state": "", "incarnation": 0})


@contextmanager
def two_nodes(
    sessions: SessionFactory, folder: Path, *, full_sync_every: int = 1
) -> Generator[TwoNodes]:
    lead = sessions(tcp_host="127.0.0.1")
    with JoinedNode(folder, ["--join", str(sessions.run_dirs[-1])]) as far:
        yield TwoNodes(lead, far, full_sync_every)
        sessions.close()
        far.wait()


def fingerprint(tensors: dict[str, Tensor]) -> int:
    """That engines with these weights have."""
    return weights_fingerprint(
        [flatten(tensor).view(torch.uint8).numpy().tobytes() for tensor in tensors.values()]
    )
