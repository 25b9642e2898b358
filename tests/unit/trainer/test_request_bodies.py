"""Bodies of requests: how many bytes are held, and for how long they may arrive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from umbra.trainer.serving.openai_requests import ApiError, RequestBodies


async def arriving(*sizes: int, ends: bool = True) -> AsyncGenerator[bytes]:
    """Chunks of these sizes, and then the end, or nothing, as of a client that stops there."""
    for size in sizes:
        yield b"x" * size
    if not ends:
        await asyncio.Event().wait()


def test_bytes_count_from_their_arrival_until_the_answer() -> None:
    async def read() -> None:
        with bodies.holding() as first, bodies.holding() as second:
            for body, chunks in ((first, arriving(5, 5, 99)), (second, arriving(5))):
                with contextlib.suppress(ApiError):
                    await bodies.read(chunks, body)
            with bodies.holding() as third:
                await bodies.read(arriving(1), third)

    bodies = RequestBodies(max_nbytes=10, max_held_nbytes=15, limit_s=30.0)

    for _ in range(2):
        with pytest.raises(ApiError, match="have 15 of at most 15 bytes; try again") as error:
            asyncio.run(read())
        assert error.value.status == 429


def test_no_more_is_read_of_a_body_above_its_limit() -> None:
    bodies = RequestBodies(max_nbytes=10, max_held_nbytes=100, limit_s=30.0)

    with bodies.holding() as body, pytest.raises(ApiError, match="exceeds 10 bytes") as error:
        asyncio.run(bodies.read(arriving(8, 3, ends=False), body))

    assert (error.value.status, len(body)) == (413, 8)


def test_a_body_that_stops_in_the_middle_is_refused_after_a_while() -> None:
    bodies = RequestBodies(max_nbytes=10, max_held_nbytes=10, limit_s=0.05)

    with (
        bodies.holding() as body,
        pytest.raises(ApiError, match=r"^8 bytes of the body arrived in 0.05 s") as error,
    ):
        asyncio.run(bodies.read(arriving(8, ends=False), body))

    assert error.value.status == 408
