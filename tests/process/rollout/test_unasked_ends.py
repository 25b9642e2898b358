"""Processes that end without being asked to, whatever their exit status, cost no sample."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ending_actors import ENDS, IN_HERE
from live_rollouts import LiveRollouts, merged, while_generating

from umbra.runtime.cluster.placement import PoolMode
from umbra.runtime.errors import ConnectionLost
from umbra.runtime.testing.factories import SessionFactory

pytestmark = [pytest.mark.process, pytest.mark.slow]

SLOW: dict[str, Any] = {"tokens_per_s": 60.0}  # a second for each completion
MAX_STEPS = 40
"""Each engine process needs one or two of them until it ends."""


def check_batch(live: LiveRollouts, step: int) -> None:
    """Asserts that a step's batch has every sample once, and whole."""
    samples = merged(live.next_batch(step))
    assert [len(sample["completion"]) for sample in samples.values()] == [64] * 16


def check_reported(factory: SessionFactory, name: str, hows: Sequence[str]) -> None:
    """Asserts that the end of each of its first incarnations was reported.

    One that closes its sockets before it ends may be killed by who calls it.
    """
    for life, how in enumerate(hows, 1):
        (note,) = [
            note
            for note in factory.notes
            if note.startswith(f"{name}#{life} ") and "; restarting it in " in note
        ]
        is_killed = "went away before it answered" in note or "nothing listens at its" in note
        assert f") {ENDS[how]}; restarting" in note or is_killed


@pytest.mark.parametrize(
    ("mode", "num_engines", "points"),
    [
        ("standalone", 2, ["generation", "sync"]),
        ("hybrid", 1, ["generation", "sync", "sleep"]),
    ],
)
def test_an_engine_that_ends_at_any_point_is_replaced(
    umbra_session_factory: SessionFactory,
    tmp_path: Path,
    mode: PoolMode,
    num_engines: int,
    points: list[str],
) -> None:
    lives = [(point, how) for how in ENDS for point in points]
    session = umbra_session_factory()
    pool: dict[str, Any] = {"engine": "ending_actors:EndingEcho", "env": {"PYTHONPATH": IN_HERE}}
    live = LiveRollouts(
        session, tmp_path, num_engines=num_engines, pool_mode=mode, pool=pool,
        engine=SLOW | {"lives": lives}, max_restarts=len(lives),
    )  # fmt: skip

    step = 0
    while live.processes()["policy-0"]["incarnation"] <= len(lives):
        assert step < MAX_STEPS, live.processes()["policy-0"]
        live.publish(step)  # one that ended asleep is started now
        check_batch(live, step)
        if mode == "hybrid":
            session.pool("policy").sleep(2)
        step += 1
    session.supervisor_call("resolve", "policy-0", 20.0, len(lives), timeout_s=21.0)

    check_reported(umbra_session_factory, "policy-0", [how for _, how in lives])


def test_a_manager_that_ends_is_replaced(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    session = umbra_session_factory()
    live = LiveRollouts(session, tmp_path, engine=SLOW, manager="ending_actors:EndingManager")

    for step, how in enumerate(ENDS):

        def end(how: str = how) -> None:
            with contextlib.suppress(ConnectionLost):
                live.manager.call("end", how)

        live.publish(step)
        with while_generating(live, 100, end), contextlib.suppress(ConnectionLost):
            live.next_batch(step)
        session.supervisor_call("resolve", "rollouts", 20.0, step + 1, timeout_s=21.0)
        check_batch(live, step)

    check_reported(umbra_session_factory, "rollouts", list(ENDS))


def test_a_worker_that_its_reward_ends_is_replaced(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    hows = ["SIGTERM", "SIGINT", "os._exit(0)"]
    session = umbra_session_factory()
    live = LiveRollouts(session, tmp_path, reward="ends_once")

    for step, how in enumerate(hows):
        (tmp_path / "marker").write_text(how)
        live.publish(step)
        check_batch(live, step)
        session.supervisor_call("resolve", "rewards-0", 20.0, step + 1, timeout_s=21.0)

    check_reported(umbra_session_factory, "rewards-0", hows)
