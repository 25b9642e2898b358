"""The embedded engine at the speed of a larger model, for interruptions in the middle."""

from __future__ import annotations

import time
from typing import Final

from umbra.engines.embedded.embedded_core import EngineCore
from umbra.engines.embedded.embedded_engine import EmbeddedEngine

_STEP_S: Final = 0.01
"""Of each step, in which every running sequence gets a token."""

_step = EngineCore.step


def _paced_step(self: EngineCore) -> None:
    time.sleep(_STEP_S)  # on the thread that computes
    _step(self)


class PacedEngine(EmbeddedEngine):
    """Alone in its process."""


EngineCore.step = _paced_step
