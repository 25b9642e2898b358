"""An actor that does, on request, everything a remote call can run into."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np

from umbra.runtime.actor.actor_spec import idempotent
from umbra.runtime.errors import ConfigError, ConnectionLost


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class Probe:
    """Counts what happens to its calls, so that tests can see it from outside."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._secret = "nobody may read this"

    def _count(self, what: str) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1

    def counts(self) -> dict[str, int]:
        return self._counts

    # -- values --------------------------------------------------------------------------

    def echo(self, value: Any, *, twice: bool = False) -> Any:
        return [value, value] if twice else value

    async def echo_async(self, value: Any) -> Any:
        return value

    def append(self, value: int) -> int:
        """Its position among the calls of this method."""
        self._count("appended")
        return self._counts["appended"] - 1

    def digest(self, array: Any) -> dict[str, Any]:
        return {
            "sha": hashlib.sha256(array.tobytes()).hexdigest(),
            "dtype": array.dtype.str,
            "shape": list(array.shape),
            "is_view": not array.flags.owndata,
            "is_writeable": bool(array.flags.writeable),
        }

    def ramp(self, num_items: int) -> Any:
        return np.arange(num_items, dtype=np.int64)

    def unsendable(self, kind: str) -> Any:
        match kind:
            case "set":
                return {1, 2}
            case "surrogate":
                return "\udc80"
            case "long bytes":
                return bytes(33 << 20)
            case _:
                raise ValueError(kind)

    # -- failures ------------------------------------------------------------------------

    def fail(self, message: str) -> None:
        raise ValueError(message)

    async def fail_async(self, message: str) -> None:
        await asyncio.sleep(0)
        raise ValueError(message)

    def fail_about_a_file(self, name: bytes) -> None:
        raise ValueError(f"{os.fsdecode(name)} is missing")

    async def fail_about_a_file_async(self, name: bytes) -> None:
        self.fail_about_a_file(name)

    def fail_with_config_error(self) -> None:
        raise ConfigError("colour: allowed are red and green")

    def fail_unprintably(self) -> None:
        raise Unprintable

    async def fail_unprintably_async(self) -> None:
        raise Unprintable

    def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    async def cancel_itself_async(self) -> None:
        await asyncio.sleep(0)
        raise asyncio.CancelledError

    @idempotent
    def lose_a_peer_of_its_own(self) -> None:
        self._count("lost a peer")
        raise ConnectionLost("a third party went away")

    # -- time ----------------------------------------------------------------------------

    async def sleep(self, seconds: float) -> str:
        self._count("began to sleep")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self._count("sleep cancelled")
            raise
        return "slept"

    async def cling(self, seconds: float) -> None:
        """Cleans up slowly when cancelled."""
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(seconds)
            self._count("cleaned up")

    def block(self, seconds: float) -> None:
        time.sleep(seconds)

    # -- death ---------------------------------------------------------------------------

    def pid(self) -> int:
        return os.getpid()

    def answer_and_exit(self, value: int) -> int:
        """The answer has left this process by the time it ends."""
        asyncio.get_running_loop().call_later(0.05, os._exit, 0)
        return value

    @idempotent
    def die_the_first_time(self, marker: str) -> str:
        return self._die_unless(marker)

    def die_the_first_time_for_good(self, marker: str) -> str:
        """The same, but not declared idempotent."""
        return self._die_unless(marker)

    def _die_unless(self, marker: str) -> str:
        if not Path(marker).exists():
            Path(marker).touch()
            os._exit(1)
        return "lived"

    # -- streams -------------------------------------------------------------------------

    async def numbers(self, limit: int, fail_at: int = -1) -> AsyncGenerator[int, None]:
        try:
            for number in range(limit):
                if number == fail_at:
                    raise ValueError(f"no number {number}")
                self._count("yielded")
                yield number
        finally:
            self._count("stream closed")

    async def arrays(self, limit: int, num_items: int) -> AsyncGenerator[Any, None]:
        for number in range(limit):
            yield np.full(num_items, number, dtype=np.int32)

    async def silence(self) -> AsyncGenerator[int, None]:
        try:
            yield 0
            await asyncio.sleep(3600)
        finally:
            self._count("stream closed")

    async def clean_up_badly(self) -> AsyncGenerator[int, None]:
        try:
            while True:
                yield 0
        finally:
            raise ValueError("the clean-up failed")

    async def run(self) -> None:
        await asyncio.sleep(3600)
