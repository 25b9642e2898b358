"""Describes a serving process: its calls in both directions, its tasks."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping
from typing import Any, Final

from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.rpc.rpc_server import ActorServer

DESCRIBE: Final = "_describe_calls"
_MAX_CALLS: Final = 500
_MAX_TASKS: Final = 500
"""The oldest calls, and any tasks. More would add nothing and be slow to read."""
_MAX_LABEL_LEN: Final = 300


def describing_calls(client: Client, server: Callable[[], ActorServer]) -> Mapping[str, Any]:
    def describe() -> dict[str, Any]:
        calls = sorted(client.pending_calls() + server().running_calls(), reverse=True)
        return {
            "calls": [[age_s, label[:_MAX_LABEL_LEN]] for age_s, label in calls[:_MAX_CALLS]],
            "tasks": _describe_tasks(),
        }

    return {DESCRIBE: describe}


def _describe_tasks() -> list[str]:
    """The places where the tasks of all loops of this process wait, the innermost last. asyncio
    lists those of one loop only, and user code has a loop of its own."""
    objects: list[Any] = gc.get_objects()
    # Not isinstance, which asks each object for its class: proxies of user code may raise then.
    tasks: list[asyncio.Task[Any]] = [
        found for found in objects if issubclass(type(found), asyncio.Task)
    ]
    places = [_where(task) for task in tasks if not task.done()]
    return [place for place in places if place][:_MAX_TASKS]


_WAITING: Final = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))
"""The frame of a coroutine or generator, and the object it waits for."""


def _where(task: asyncio.Task[Any]) -> str:
    places: list[str] = []
    inner: Any = task.get_coro()
    while True:
        names = next((names for names in _WAITING if hasattr(inner, names[0])), None)
        frame = getattr(inner, names[0]) if names else None
        if names is None or frame is None:
            break
        code = frame.f_code
        places.append(f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})")
        inner = getattr(inner, names[1])
    return " > ".join(places)
