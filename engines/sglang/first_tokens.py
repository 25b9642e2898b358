"""The end of SGLang's start: its first tokens, for which it compiles kernels, some with nvcc.

With nothing in its cache (~/.cache/tvm-ffi, ~/.triton) that takes a minute or more, which is no
trajectory's. What fails in it fails the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Collection
from typing import Final, Protocol

import numpy as np

from umbra.engines.adapter.core import Output
from umbra.engines.requests import GenerationRequest
from umbra.engines.sglang import processes
from umbra.runtime.errors import EngineError

logger = logging.getLogger(__name__)

_LIMIT_S: Final = 1200.0
# A pool's start_timeout_s is sooner by default.
_SHOW_STACKS_S: Final = 60.0
# Without the first tokens for so long: the log gets to know where the schedulers are.
_NUM_REQUESTS: Final = 4


class Generator(Protocol):
    """What is asked of the core."""

    died: asyncio.Event
    is_idle: asyncio.Event

    async def add(self, key: str, request: GenerationRequest, cache_salt: str) -> Output: ...


async def generate_first_tokens(core: Generator, schedulers: Collection[int]) -> None:
    """Raises EngineError where none come."""
    started = time.perf_counter()
    async with until_died(core.died), within(_LIMIT_S, "generate its first tokens"):
        outputs = [
            await core.add(f"first-{i}", _request(i), cache_salt="first")
            for i in range(_NUM_REQUESTS)
        ]
        while not core.is_idle.is_set():
            try:
                async with asyncio.timeout(_SHOW_STACKS_S):
                    await core.is_idle.wait()
            except TimeoutError:
                logger.warning(
                    "no token from SGLang in %.0f s; where its schedulers are follows",
                    time.perf_counter() - started,
                )
                processes.show_stacks(schedulers)
    for output in outputs:
        new = output.take()
        if new is None or new.finish_reason != "length":
            raise EngineError(f"SGLang generates nothing: {new and new.finish_reason}")
    logger.info("SGLang's first tokens took %.1f s", time.perf_counter() - started)


@contextlib.asynccontextmanager
async def until_died(died: asyncio.Event) -> AsyncGenerator[None]:
    """Raises EngineError as soon as a process of SGLang ends."""

    async def fail() -> None:
        await died.wait()
        raise EngineError("a process of SGLang ended at the start; the log says why")

    try:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(fail())
            yield
            watch.cancel()
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


@contextlib.asynccontextmanager
async def within(limit_s: float, what: str) -> AsyncGenerator[None]:
    """Raises EngineError where SGLang did not do it in time."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise EngineError(f"SGLang did not {what} within {limit_s:g} s") from None


def _request(index: int) -> GenerationRequest:
    """Greedy and drawn ones in turn: a prompt, then two steps after it."""
    return GenerationRequest(
        id=index,
        tokens=np.arange(3, dtype=np.int32),
        position=0,
        seed=index,
        max_new_tokens=3,
        temperature=float(index % 2),
        stop_token_ids=(),
    )
