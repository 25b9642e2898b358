"""Transports are rows of one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any, Final, cast

import pytest
import torch
from local_world import LocalSupervisor, ThreadEngine, empty_like, local_pool

from umbra.runtime.engine_api.pool_settings import TRANSPORTS, TransportName, allowed_transports
from umbra.runtime.pools.pool_spec import SyncSettings
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.weights.exports.export_plan import ExportPlan
from umbra.runtime.weights.exports.ipc_memory import ExportSender
from umbra.runtime.weights.image.image_memory import ImagePlan, PlanParts
from umbra.runtime.weights.image.image_sender import ImageSender
from umbra.runtime.weights.links.link_plan import LinkPlan
from umbra.runtime.weights.links.link_sender import LinkSender
from umbra.runtime.weights.shards import SenderParts
from umbra.runtime.weights.transport import Sender, TransportPlan

TENSORS = {"w": torch.arange(300.0)}
PARTS: Final[
    dict[
        TransportName, tuple[Callable[[PlanParts], TransportPlan], Callable[[SenderParts], Sender]]
    ]
] = {
    "cuda_ipc": (ExportPlan, ExportSender),
    "memfd": (ImagePlan, ImageSender),
    "tcp": (LinkPlan, LinkSender),
}
"""Rows name their classes as text, whose types the type checker sees only here."""


def test_rows_name_classes_of_the_types_that_their_users_expect() -> None:
    assert {
        name: (resolve_name(row.plan), resolve_name(row.sender)) for name, row in TRANSPORTS.items()
    } == PARTS


def test_a_row_is_all_that_a_transport_of_images_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    name = cast("Any", "pigeon")
    row = replace(TRANSPORTS["memfd"], name=name)
    monkeypatch.setitem(cast("dict[Any, Any]", TRANSPORTS), name, row)
    engine = ThreadEngine("engine", empty_like(TENSORS))

    def publish(supervisor: LocalSupervisor) -> str:
        return WeightPublisher(supervisor, TENSORS).publish("pool", 1, 20.0).transport

    settings = SyncSettings()
    object.__setattr__(settings, "transport", name)  # its type has the names of the table alone
    with local_pool([engine], settings) as supervisor:
        assert publish(supervisor) == "pigeon"
    assert torch.equal(engine.destinations["w"], TENSORS["w"])
    assert allowed_transports(name) == [row]
