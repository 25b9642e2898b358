"""Which consumer of an engine gets its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from async_tests import on_a_loop

from umbra.engines.shell.engine_requests import DeltaStream
from umbra.runtime.engine_api.token_deltas import empty_batch


@on_a_loop
async def test_a_batch_reaches_the_consumer_that_was_attached_and_no_later_one() -> None:
    dropped, made = list[int](), [empty_batch() for _ in range(6)]
    stream = DeltaStream(dropped.append)

    async def attach() -> AsyncGenerator[Any, None]:
        consumer = stream.read()
        confirmed = await anext(consumer)
        assert not any(confirmed is batch for batch in made)
        return consumer

    async def put(batch: Any) -> None:
        stream.put(batch)

    async with asyncio.timeout(10.0):
        stream.put(made[0])
        first = await attach()  # owns what was submitted before
        assert dropped == []
        assert await anext(first) is made[0]
        got, _ = await asyncio.gather(anext(first), put(made[1]))
        assert got is made[1]

        end, second = await asyncio.gather(anext(first, None), attach())
        assert (end, dropped, stream.epoch) == (None, [1], 1)
        stream.put(made[2])
        third = await attach()
        stream.put(made[3])
        assert await anext(third) is made[3]
        assert await anext(second, None) is None
        await third.aclose()
        assert dropped == [1, 2, 3]

        last = await attach()
        assert dropped == [1, 2, 3], "nobody was attached"
        stream.put(made[4])
        stream.fail(ValueError("lost"))
        assert await anext(last) is made[4]
        with pytest.raises(ValueError, match="lost"):
            await anext(last)
        assert dropped == [1, 2, 3, 4]
