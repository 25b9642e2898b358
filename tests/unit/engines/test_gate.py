"""An engine's own lifecycle, and the outcome of an aborted update."""

from __future__ import annotations

import pytest

from umbra.engines.shell.engine_gate import EngineGate
from umbra.runtime.errors import IllegalTransition


def updating(version: int) -> EngineGate:
    """One that holds version 3, and has begun to update."""
    gate = EngineGate()
    gate.start_serving(3)
    gate.begin_update(version, is_idle=True)
    return gate


def test_an_update_aborted_before_its_load_leaves_the_version() -> None:
    gate = updating(4)

    gate.abort_update()
    gate.resume()

    assert (gate.is_serving, gate.version) == (True, 3)


def test_an_update_aborted_after_that_leaves_none() -> None:
    gate = updating(4)
    gate.touch()

    gate.abort_update()

    assert gate.version is None
    with pytest.raises(IllegalTransition):
        gate.resume()
