from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRef:
    """Address of one incarnation of a named actor: a plain value that can be stored,
    compared and sent.

    Every call carries `incarnation`, so a message meant for an actor that has since been restarted
    is refused, never delivered to its successor.

    Attributes:
        name: unique within the node.
        incarnation: how many times the actor has been started on this node, from 1.
        node_id: the host the actor lives on.
        ipc_endpoint: `ipc://...`, reachable on the same node.
        tcp_endpoint: `tcp://...` under CURVE, or "" if the job has no tcp.
    """

    name: str
    incarnation: int
    node_id: str
    ipc_endpoint: str
    tcp_endpoint: str = ""

    def endpoint_from(self, node_id: str) -> str:
        """The endpoint that a caller on `node_id` uses: ipc on the same node, else tcp."""
        return self.ipc_endpoint if node_id == self.node_id else self.tcp_endpoint

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}@{self.node_id}"
