"""`umbra bench startup`: from nothing to the first answered call, each in a fresh interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from umbra.runtime.bench.program import ALL_SYSTEMS
from umbra.runtime.bench.rounds import compare


def run(rounds: int, peer_python: str, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Medians over `rounds`.

    Per system: `ready_s`, from the start of its services until they can start an actor (umbra: the
    guardian's start until the supervisor is ready); `first_call_s`, from entering the session (or
    `ray.init`, ...) to the first answered call of an actor; `first_call_from_exec_s`, the same from
    the start of the caller's interpreter; `resident_mb` of the processes beside the two that talk,
    of which `supervisor_resident_mb` is the supervisor's.
    """
    return compare(
        "startup",
        ALL_SYSTEMS,
        rounds=rounds,
        peer_python=peer_python,
        duration_s=0.0,
        extra={"umbra": "umbra_supervisor"},
        on_progress=on_progress,
    )
