"""Supervised actors as a test sees them: their incarnations, and the notes to operators."""

from __future__ import annotations

import time
from collections.abc import Callable

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.errors import ConnectionLost
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.session import Session
from umbra.runtime.testing.factories import SessionFactory

Spawn = Callable[[ActorSpec], SyncHandle]


def wait_for_incarnation(session: Session, incarnation: int, name: str) -> int:
    """The pid of that incarnation, once it is up."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        handle = session.actor(name, timeout_s=60.0)
        if handle.ref.incarnation >= incarnation:
            try:
                who = handle.call("who", timeout_s=30.0)
            except ConnectionLost:
                continue
            if who["incarnation"] >= incarnation:
                return int(who["pid"])
        time.sleep(0.005)  # else it and the supervisor are busy with asking
    raise AssertionError(f"{name} did not reach incarnation {incarnation}")


def was_reported(factory: SessionFactory, handle: SyncHandle, text: str) -> bool:
    """Whether an operator got this note about that actor."""
    return any(handle.ref.name in note and text in note for note in factory.notes)
