from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRef:
    """Address of one incarnation of a named actor: a plain value, to be stored, compared and sent.
    Every call carries `incarnation`, so a message meant for an actor that has since been restarted
    is refused, never delivered to its successor."""

    name: str  # unique within the node
    incarnation: int  # how many times the actor has been started on this node, from 1
    node_id: str  # the host the actor lives on
    ipc_endpoint: str  # `ipc://...`, reachable on the same node
    tcp_endpoint: str = ""  # `tcp://...` under CURVE, or "" if the job has no tcp

    def endpoint_from(self, node_id: str) -> str:
        """The endpoint that a caller on `node_id` uses: ipc on the same node, else tcp."""
        return self.ipc_endpoint if node_id == self.node_id else self.tcp_endpoint

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}@{self.node_id}"
