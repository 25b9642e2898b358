"""An engine that finds too little GPU memory, as it starts or wakes, in the words of real ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from umbra.engines.echo.echo_engine import EchoEngine
from umbra.runtime.actor.actor_spec import actor_context
from umbra.runtime.errors import EngineError


class ShortEngine(EchoEngine):
    """Args:
    at_wake: incarnations that raise at their first wake.
    exits: they end instead, as SGLang's torch_memory_saver does.
    at_load: incarnations that wake, and then raise as they load.
    at_start: incarnations that do not start.
    """

    def __init__(
        self,
        *,
        at_wake: Sequence[int] = (),
        exits: bool = False,
        at_load: Sequence[int] = (),
        at_start: Sequence[int] = (),
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        incarnation = actor_context().incarnation
        if incarnation in at_start:
            # vLLM: the cause is in another process's traceback.
            print("(EngineCore pid=3) ERROR 11-23 01:25:09 [core.py:1330] torch.OutOfMemoryError: ")
            print("CUDA out of memory. Tried to allocate 1.15 GiB. GPU 0 has ...", flush=True)
            raise EngineError("vLLM 0.26.0 did not start: Engine core initialization failed.")
        if incarnation in at_wake:
            self._core.wake = exit_at_wake if exits else fail_to_wake
        self._fails_to_load = incarnation in at_load

    async def load(self) -> dict[str, int]:
        was_asleep = "weights" not in self._gate.awake
        loaded = await super().load()
        if was_asleep and self._fails_to_load:
            raise EngineError("CUDA out of memory. Tried to allocate 1.15 GiB.")
        return loaded


async def fail_to_wake(tags: Sequence[str]) -> None:
    raise EngineError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163")


async def exit_at_wake(tags: Sequence[str]) -> None:
    print("[torch_memory_saver.cpp] CUresult error: 2 (out of memory)", file=sys.stderr, flush=True)
    os._exit(1)
