"""Supervision, RPC and sessions. umbra is built on them, and any torchrun program can use them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy, actor_context, idempotent
    from umbra.runtime.pools.pool_spec import PoolSpec
    from umbra.runtime.rpc.sync_handle import Pool, SyncHandle
    from umbra.runtime.rpc.wire import ActorRef
    from umbra.runtime.session.launch import SessionConfig
    from umbra.runtime.session.session import Session

__all__ = [
    "ActorRef",
    "ActorSpec",
    "Pool",
    "PoolSpec",
    "RestartPolicy",
    "Session",
    "SessionConfig",
    "SyncHandle",
    "actor_context",
    "idempotent",
]

_HOMES = {
    "ActorRef": "rpc.wire",
    "ActorSpec": "actor.actor_spec",
    "Pool": "rpc.sync_handle",
    "PoolSpec": "pools.pool_spec",
    "RestartPolicy": "actor.actor_spec",
    "Session": "session.session",
    "SessionConfig": "session.launch",
    "SyncHandle": "rpc.sync_handle",
    "actor_context": "actor.actor_spec",
    "idempotent": "actor.actor_spec",
}


def __getattr__(name: str) -> object:
    """Imports on first use: an actor's process needs no session, and a test run no sockets."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
