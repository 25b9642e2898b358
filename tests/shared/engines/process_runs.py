"""Engines in actors' processes: who they are, what they generate, and that they have ended."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from engine_runs import Collector, Completion, wire_request

from umbra.runtime.process import descendants
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.session import Session


def actor_of(session: Session, name: str) -> dict[str, Any]:
    (actor,) = (a for a in session.supervisor_call("list_actors") if a["name"] == name)
    return actor


def tree_of(pid: int) -> list[int]:
    """A process and all below it."""
    return [pid, *(below for below, _ in descendants.living_descendants(pid))]


def greedy(engine: SyncHandle, timeout_s: float = 20.0) -> list[int]:
    """The same 20 tokens from every engine with the same weights."""
    request = wire_request(0, [1, 2, 3], max_new_tokens=20, temperature=0.0)
    return completion_of(engine, request, timeout_s).tokens


def completion_of(
    engine: SyncHandle, request: dict[str, Any], timeout_s: float = 20.0
) -> Completion:
    collector = Collector()
    engine.call("submit", [request])
    with closing(engine.stream("deltas", timeout_s=timeout_s)) as batches:
        for batch in batches:
            collector.apply(batch)
            if collector.num_finished():
                return collector[request["id"]]
    raise AssertionError("the stream ended")


def assert_ended(pids: list[int], timeout_s: float = 20.0) -> None:
    for pid in pids:
        if Path(f"/proc/{pid}").exists():
            descendants.wait_for_exits([pid], timeout_s)
        stat = descendants.process_stat(pid)
        assert stat is None or stat.has_ended
