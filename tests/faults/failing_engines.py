"""Engines that fail as a whole, at several points of their lifecycle."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from umbra.engines.echo.echo_engine import EchoEngine
from umbra.runtime.actor.actor_spec import actor_context


class DiesAtStart:
    """Ends the process in its constructor, like a driver that aborts."""

    def __init__(self, **settings: Any) -> None:
        print("CUDA driver version is insufficient", flush=True)
        os._exit(5)


class KilledInFirstStart(EchoEngine):
    """Its first incarnation is killed during its start, as by the kernel when memory is short."""

    def __init__(self, **settings: Any) -> None:
        if actor_context().incarnation == 1:
            print("loading the model", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(**settings)


class DiesInSync(EchoEngine):
    """Starts, and ends its process whenever it gets weights: a crash in a loop."""

    async def load(self) -> dict[str, int]:
        os._exit(6)


class DiesAtWork(EchoEngine):
    """Takes weights, and ends its process at the first request: a crash in a loop."""

    async def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        os._exit(7)


class HangsInStart(EchoEngine):
    """Blocks in its constructor, like a library that waits for a peer which never comes."""

    def __init__(self, **settings: Any) -> None:
        wait_for_a_peer()


def wait_for_a_peer() -> None:
    while True:
        time.sleep(1.0)
