"""Engines that fail as a whole, at several points of their lives."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from umbra.engines.echo.echo_engine import EchoEngine
from umbra.runtime.actor.actor_spec import actor_context


class DiesAtStart:
    """Its constructor ends the process, as a driver that aborts does."""

    def __init__(self, **settings: Any) -> None:
        print("CUDA driver version is insufficient", flush=True)
        os._exit(5)


class KilledInFirstStart(EchoEngine):
    """Its first life is killed before it is up, as by the kernel where memory is short."""

    def __init__(self, **settings: Any) -> None:
        if actor_context().incarnation == 1:
            print("loading the model", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(**settings)


class DiesInSync(EchoEngine):
    """Comes up, and ends whenever it gets weights: a crash in a loop."""

    async def load(self) -> dict[str, int]:
        os._exit(6)


class DiesAtWork(EchoEngine):
    """Takes weights, and ends with its first request: a crash in a loop."""

    async def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        os._exit(7)
