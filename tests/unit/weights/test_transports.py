"""Transports are rows of one table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from local_world import LocalSupervisor, ThreadEngine, empty_like, local_pool

from umbra.runtime.engine_api.transports import TRANSPORTS, allowed_transports
from umbra.runtime.pools.pool_spec import SyncSettings
from umbra.runtime.session.weight_publisher import WeightPublisher

TENSORS = {"w": torch.arange(300.0)}


def test_a_row_is_all_that_a_transport_of_images_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    name = cast("Any", "pigeon")
    row = replace(TRANSPORTS["memfd"], name=name, is_opt_in=True)
    monkeypatch.setitem(cast("dict[Any, Any]", TRANSPORTS), name, row)
    engine = ThreadEngine("engine", empty_like(TENSORS))

    def publish(supervisor: LocalSupervisor) -> str:
        return WeightPublisher(supervisor, TENSORS).publish("pool", 1, 20.0).transport

    settings = SyncSettings()
    object.__setattr__(settings, "transport", name)  # its type has the names of the table alone
    with local_pool([engine], settings) as supervisor:
        assert publish(supervisor) == "pigeon"
    assert torch.equal(engine.destinations["w"], TENSORS["w"])
    assert row not in allowed_transports("auto")
    assert allowed_transports(name) == [row]
