from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from umbra.runtime.errors import EngineError


@contextlib.asynccontextmanager
async def until_died(died: asyncio.Event) -> AsyncGenerator[None]:
    async def fail() -> None:
        await died.wait()
        raise EngineError("a process of SGLang ended during the start; the log has the reason")

    try:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(fail())
            yield
            watch.cancel()
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


@contextlib.asynccontextmanager
async def within(limit_s: float, what: str) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise EngineError(f"SGLang did not {what} within {limit_s:g} s") from None
