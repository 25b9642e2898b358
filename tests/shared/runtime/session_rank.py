"""Ranks of one process, which share its session."""

from __future__ import annotations

from dataclasses import dataclass

from umbra.runtime.session.session import Session
from umbra.runtime.weights.sync_messages import Answer, SyncMessage


@dataclass
class SessionRank:
    """One of `world_size` ranks, as its `WeightPublisher` sees the session. `tcp_host` is that of
    the rank's node."""

    session: Session
    rank: int = 0
    world_size: int = 1
    tcp_host: str = ""

    @property
    def node_id(self) -> str:
        return self.session.node_id

    @property
    def fd_socket(self) -> str:
        return self.session.fd_socket

    def raise_if_lost(self) -> None:
        self.session.raise_if_lost()

    def sync(self, message: SyncMessage[Answer]) -> Answer:
        return self.session.sync(message)
