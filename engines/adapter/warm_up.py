"""One short request at a foreign engine's start, before it is said to be up."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

import numpy as np

from umbra.engines.adapter.core import Core
from umbra.engines.requests import GenerationRequest
from umbra.runtime.errors import EngineError

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S: Final = 0.01
_TELL_AFTER_S: Final = 60.0
_REQUEST: Final = GenerationRequest(
    id=0,
    tokens=np.zeros(1, np.int32),
    position=0,
    seed=0,
    max_new_tokens=2,  # one by prefill, one by decoding
    temperature=1.0,
    stop_token_ids=(),
)


async def warm_up(core: Core) -> None:
    """What an engine compiles for its first request (vLLM on the CPU: for many seconds) belongs to
    its start: who waits for tokens, or watches for a stall, can rely on it from then on. The
    deadline is that of the start.

    Raises:
        EngineError: it cannot generate.
    """
    started = told = time.monotonic()
    output = await core.add("warm-up", _REQUEST, "warm-up")
    while True:
        new = output.take()
        if new is not None and new.finish_reason is not None:
            break
        if core.died.is_set():
            raise EngineError(f"a process of {core.name} ended at its first request")
        if time.monotonic() - told > _TELL_AFTER_S:
            told = time.monotonic()
            logger.warning("no token of %s in %.0f s yet", core.name, told - started)
            core.show_stacks()
        await asyncio.sleep(_LOOK_INTERVAL_S)
    if new.finish_reason != "length":
        raise EngineError(f"{core.name} ended its first request: {new.finish_reason}")
