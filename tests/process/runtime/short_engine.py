"""An engine that finds too little GPU memory, as it starts or wakes, in the words of real ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from umbra.engines.echo.echo_engine import EchoEngine
from umbra.runtime.actor.actor_spec import actor_context
from umbra.runtime.engine_api.lifecycle import Tag
from umbra.runtime.errors import EngineError


class ShortEngine(EchoEngine):
    """Args:
    at_wake: incarnations that raise at their first wake.
    exits: they end instead, as SGLang's torch_memory_saver does.
    at_start: incarnations that do not start.
    """

    def __init__(
        self,
        *,
        at_wake: Sequence[int] = (),
        exits: bool = False,
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
        self._fails_to_wake = incarnation in at_wake
        self._exits = exits

    async def _wake(self, tags: Sequence[Tag]) -> None:
        is_first = self._fails_to_wake and not self._gate.awake.issuperset(tags)
        if is_first and self._exits:
            print("[torch_memory_saver.cpp] CUresult error: 2 (out of memory)", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)
        if is_first:
            raise EngineError(
                "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163"
            )
        await super()._wake(tags)
