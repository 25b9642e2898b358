"""Engine processes see the GPUs of the plan, its own first, and so do their successors."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pools_in_turn import spec, wait_until

from umbra.runtime.cluster.placement import EngineGpus
from umbra.runtime.session.session import Session

pytestmark = pytest.mark.process


def actor(session: Session, name: str) -> dict[str, Any]:
    rows = session.supervisor_call("list_actors")
    return next(row for row in rows if row["name"] == name)


def visible_gpus(session: Session, name: str) -> str:
    """CUDA_VISIBLE_DEVICES of the engine's process, as the kernel reports it."""
    environ = Path(f"/proc/{actor(session, name)['pid']}/environ").read_bytes().split(b"\0")
    (value,) = [item for item in environ if item.startswith(b"CUDA_VISIBLE_DEVICES=")]
    return value.decode().partition("=")[2]


def test_an_engine_and_its_successor_see_the_same_gpus(umbra_session: Session) -> None:
    plan = ("GPU-a,GPU-b", "GPU-b,GPU-a")
    gpus = (
        EngineGpus(own=("GPU-a",), others=("GPU-b",)),
        EngineGpus(own=("GPU-b",), others=("GPU-a",)),
    )
    umbra_session.create_pool(spec("policy", count=2, engine_gpus=gpus))
    names = ("policy-0", "policy-1")
    first = tuple(visible_gpus(umbra_session, name) for name in names)

    os.kill(actor(umbra_session, "policy-1")["pid"], signal.SIGKILL)
    wait_until(lambda: actor(umbra_session, "policy-1")["incarnation"] == 2)
    wait_until(lambda: actor(umbra_session, "policy-1")["state"] == "RUNNING")

    assert first == plan
    assert tuple(visible_gpus(umbra_session, name) for name in names) == plan
