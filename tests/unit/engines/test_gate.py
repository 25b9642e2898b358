"""An engine's own lifecycle, and the outcome of an aborted update."""

from __future__ import annotations

import pytest

from umbra.engines.shell.engine_gate import EngineGate
from umbra.runtime.errors import IllegalTransition


def serving(version: int) -> EngineGate:
    gate = EngineGate()
    gate.start_serving(version)
    return gate


def test_an_abort_without_an_update_leaves_the_version() -> None:
    gate = serving(3)

    gate.abort_update()

    assert (gate.is_serving, gate.version) == (True, 3)


def test_an_aborted_update_leaves_no_version() -> None:
    gate = serving(3)
    gate.begin_update(4, is_idle=True)

    gate.abort_update()

    assert gate.version is None
    with pytest.raises(IllegalTransition):
        gate.resume()
