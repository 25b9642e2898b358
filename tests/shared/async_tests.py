"""Tests that are coroutines, and the clock of their loops."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")


def on_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs the test on an event loop of its own. An error in one of the loop's callbacks, which
    asyncio only logs, fails it too."""

    async def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        errors = list[dict[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        await test(*args, **kwargs)
        assert not errors

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(checked(*args, **kwargs))

    return run


def skip_time(seconds: float) -> None:
    """Lets seconds of the running loop's clock pass at once: its timers up to then are due."""
    loop = asyncio.get_running_loop()
    before = loop.time
    setattr(loop, "time", lambda: before() + seconds)  # noqa: B010 - a method, for type checkers
