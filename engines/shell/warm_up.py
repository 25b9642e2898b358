from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

import numpy as np

from umbra.engines.shell.engine_core import AdapterCore
from umbra.runtime.engine_api.generation_request import GenerationRequest
from umbra.runtime.errors import EngineError
from umbra.runtime.first_of import first_of

logger = logging.getLogger(__name__)

_REPORT_AFTER_S: Final = 60.0
_REQUEST: Final = GenerationRequest(
    id=0,
    tokens=np.zeros(1, np.int32),
    position=0,
    seed=0,
    max_new_tokens=2,  # one by prefill, one by decoding
    temperature=1.0,
    stop_token_ids=(),
)


async def warm_up(core: AdapterCore) -> None:
    """Runs a two-token request before the engine reports ready, so that it compiles during its
    start. Compiling takes many seconds with vLLM on the CPU. From then on, callers and the stall
    watchdog can expect tokens promptly. The start's own deadline applies."""
    started = time.monotonic()
    output = await core.add("warm-up", _REQUEST, "warm-up", 1)
    while True:
        try:
            new = output.take()
        except Exception as error:  # of the engine's library; the log has the cause
            raise EngineError(f"{core.name} failed at its first request: {error}") from error
        if new is not None and new.finish_reason is not None:
            break
        if core.died.is_set():
            raise EngineError(f"a process of {core.name} ended at its first request")
        try:
            async with asyncio.timeout(_REPORT_AFTER_S):
                await first_of(output.changed, core.died)
        except TimeoutError:
            took_s = time.monotonic() - started
            logger.warning("%s has not ended its first request in %.0f s", core.name, took_s)
            core.show_stacks()
    if new.finish_reason != "length":
        raise EngineError(f"{core.name} ended its first request: {new.finish_reason}")
