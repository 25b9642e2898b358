"""Supervision, RPC and sessions: what umbra is built on, usable by any torchrun program."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umbra.runtime.actor import ActorSpec, actor_context, idempotent
    from umbra.runtime.pool_spec import PoolSpec
    from umbra.runtime.restart import RestartPolicy
    from umbra.runtime.rpc.ref import ActorRef
    from umbra.runtime.session import Session, SessionConfig
    from umbra.runtime.session_handles import Pool, SyncHandle

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
    "ActorRef": "rpc.ref",
    "ActorSpec": "actor",
    "Pool": "session_handles",
    "PoolSpec": "pool_spec",
    "RestartPolicy": "restart",
    "Session": "session",
    "SessionConfig": "session",
    "SyncHandle": "session_handles",
    "actor_context": "actor",
    "idempotent": "actor",
}


def __getattr__(name: str) -> object:
    """Imports on first use: an actor's process needs no session, a test run no sockets."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
