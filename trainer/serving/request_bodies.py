"""The bodies of the requests in progress, of which there is a limited amount."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, Generator

from umbra.trainer.serving.api_error import ApiError


class RequestBodies:
    """Counts bodies from their first byte until their requests are answered.

    Args:
        max_nbytes: of one body.
        max_held_nbytes: of all of them.
        limit_s: for a body to arrive.
    """

    def __init__(self, *, max_nbytes: int, max_held_nbytes: int, limit_s: float) -> None:
        self._max_nbytes = max_nbytes
        self._max_held_nbytes = max_held_nbytes
        self._limit_s = limit_s
        self._held_nbytes = 0

    @contextlib.contextmanager
    def holding(self) -> Generator[bytearray]:
        """A body that counts within the block; `read` fills it."""
        body = bytearray()
        try:
            yield body
        finally:
            self._held_nbytes -= len(body)

    async def read(self, chunks: AsyncIterable[bytes], body: bytearray) -> None:
        """Raises ApiError if the body or all of them are too large, or it takes too long."""
        try:
            async with asyncio.timeout(self._limit_s):
                async for chunk in chunks:
                    self._check(len(body), len(chunk))
                    body += chunk
                    self._held_nbytes += len(chunk)
        except TimeoutError:
            raise ApiError(
                408, f"{len(body)} bytes of the body arrived in {self._limit_s:g} s, and no more"
            ) from None

    def _check(self, num_before: int, num_more: int) -> None:
        if num_before + num_more > self._max_nbytes:
            raise ApiError(413, f"the body exceeds {self._max_nbytes} bytes")
        if self._held_nbytes + num_more > self._max_held_nbytes:
            raise ApiError(
                429,
                f"the bodies of the requests in progress have {self._held_nbytes} of at most "
                f"{self._max_held_nbytes} bytes; try again later",
            )
