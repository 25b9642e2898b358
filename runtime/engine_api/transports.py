"""Facts about umbra's transports, the ways of weights to engines, without the import of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

TransportName = Literal["cuda_ipc", "memfd", "tcp"]
TransportSetting = Literal["auto", TransportName]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """Facts about a transport.

    Attributes:
        plan: `module:Class` of the supervisor's part, see `TransportPlan`.
        sender: `module:Class` of a rank's part, see `Sender`.
        reads_ranks: engines read the memory of the ranks, instead of an image on their node.
        crosses_nodes: it reaches engines on other nodes, and may send changes alone.
    """

    name: TransportName
    plan: str
    sender: str
    reads_ranks: bool = False
    crosses_nodes: bool = False


_WEIGHTS: Final = "umbra.runtime.weights"

TRANSPORTS: Final[Mapping[TransportName, Transport]] = {
    transport.name: transport
    for transport in (
        Transport(
            name="cuda_ipc",
            plan=f"{_WEIGHTS}.exports.export_plan:ExportPlan",
            sender=f"{_WEIGHTS}.exports.ipc_memory:ExportSender",
            reads_ranks=True,
        ),
        Transport(
            name="memfd",
            plan=f"{_WEIGHTS}.image.image_memory:ImagePlan",
            sender=f"{_WEIGHTS}.image.image_sender:ImageSender",
        ),
        Transport(
            name="tcp",
            plan=f"{_WEIGHTS}.links.link_plan:LinkPlan",
            sender=f"{_WEIGHTS}.links.link_sender:LinkSender",
            crosses_nodes=True,
        ),
    )
}
"""The fastest first, in which order "auto" tries them."""


def allowed_transports(setting: TransportSetting) -> list[Transport]:
    """The transports that a pool with this setting may use."""
    if setting != "auto":
        return [TRANSPORTS[setting]]
    return list(TRANSPORTS.values())
