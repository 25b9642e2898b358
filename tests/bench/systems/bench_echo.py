"""The actor that the benchmark calls."""

from __future__ import annotations

import os


class Echo:
    """Answers what it is asked."""

    def echo(self, value: bytes) -> bytes:
        return value

    async def echo_async(self, value: bytes) -> bytes:
        return value

    def pid(self) -> int:
        return os.getpid()
