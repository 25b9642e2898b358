from __future__ import annotations

import asyncio


async def first_of(*events: asyncio.Event) -> None:
    """Returns once one of the events is set."""
    if any(event.is_set() for event in events):
        return
    async with asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
