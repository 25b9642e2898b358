"""Blocking handles that a session gives to plain code: an actor, and a pool's engines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from umbra.runtime.errors import MailboxClosed
from umbra.runtime.rpc.actor_ref import ActorRef
from umbra.runtime.rpc.loop_thread import LoopThread
from umbra.runtime.rpc.rpc_client import Handle


class SyncHandle:
    """Calls one actor from plain code; see `rpc_client.Handle` for the outcomes."""

    def __init__(self, loop: LoopThread, handle: Handle) -> None:
        self._loop = loop
        self._handle = handle

    @property
    def ref(self) -> ActorRef:
        return self._handle.ref

    def call(self, method: str, /, *args: object, timeout_s: float = 30.0, **kwargs: object) -> Any:
        """Calls `method` and waits for its outcome."""
        return self._loop.run(self._handle.call(method, *args, timeout_s=timeout_s, **kwargs))

    def stream(
        self, method: str, /, *args: object, timeout_s: float | None = 30.0, credits: int = 16
    ) -> Generator[Any, None, None]:
        """Iterates over a stream; closing the generator cancels the callee's."""
        opened = self._handle.stream(method, *args, timeout_s=timeout_s, credits=credits)
        items = self._loop.run(opened.__aenter__())

        async def take() -> Any:
            return await anext(items)

        async def leave() -> None:
            await opened.__aexit__(None, None, None)

        try:
            while True:
                try:
                    item = self._loop.run(take())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            # A generator may outlive its session.
            with contextlib.suppress(MailboxClosed):
                self._loop.run(leave(), even_if_failed=True)


class Pool:
    """The engines of one pool, from the trainer's side. One rank alone may call it."""

    def __init__(self, supervisor_call: Callable[..., Any], name: str) -> None:
        self._supervisor_call = supervisor_call
        self.name = name

    def states(self) -> list[dict[str, Any]]:
        """Per engine: `engine`, `incarnation`, `state`, `version`, `num_restarts`."""
        states: list[dict[str, Any]] = self._supervisor_call("pool_states", self.name)
        return states

    def pause(self, mode: str = "abort", timeout_s: float = 60.0) -> None:
        """Stops generation: `abort`, `keep` (freeze) or `drain` (finish first)."""
        self._call("pool_pause", mode, timeout_s=timeout_s)

    def resume(self, timeout_s: float = 60.0) -> None:
        self._call("pool_resume", timeout_s=timeout_s)

    def sleep(self, level: int = 2, timeout_s: float = 60.0) -> None:
        """Frees memory: level 1 keeps weights on the host, level 2 drops them."""
        self._call("pool_sleep", level, timeout_s=timeout_s)

    def wake(self, tags: list[str], timeout_s: float = 60.0) -> None:
        """Allocates memory again: `weights`, `kv_cache`."""
        self._call("pool_wake", tags, timeout_s=timeout_s)

    def _call(self, method: str, *args: object, timeout_s: float) -> None:
        self._supervisor_call(method, self.name, *args, timeout_s, timeout_s=timeout_s + 5.0)
