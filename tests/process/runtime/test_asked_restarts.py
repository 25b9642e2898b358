"""Actors that a rank stops or restarts: what ends, what follows, and what their callers see."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from actor_specs import NEVER, SOON, actor
from joined_node import JoinedNode
from pools_in_turn import spec, wait_until
from watched_actors import Spawn, was_reported
from watching import all_end, kill

from umbra.runtime.errors import (
    ActorDied,
    ActorNotFound,
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
)
from umbra.runtime.session.session import Session
from umbra.runtime.testing.factories import SessionFactory

pytestmark = pytest.mark.process

LATER = replace(SOON, backoff_initial_s=600.0, backoff_max_s=600.0)


@pytest.fixture
def threads() -> Generator[ThreadPoolExecutor]:
    """For calls that wait while the test acts."""
    with ThreadPoolExecutor(2) as executor:
        yield executor


def row_of(session: Session, name: str) -> dict[str, Any]:
    """What the supervisor lists about an actor; nothing if there is none."""
    rows: list[dict[str, Any]] = session.supervisor_call("list_actors")
    return next((row for row in rows if row["name"] == name), dict[str, Any]())


# -- stop ----------------------------------------------------------------------------------


def test_an_actor_that_does_not_exist_can_be_neither_stopped_nor_restarted(
    session: Session,
) -> None:
    for act in (session.stop, session.restart):
        with pytest.raises(ActorNotFound, match="no actor 'nobody'"):
            act("nobody")


def test_an_actor_that_is_to_be_restarted_later_is_stopped_for_good(
    session: Session, spawn: Spawn
) -> None:
    echo = spawn(actor("Echo", restart=LATER))
    with pytest.raises(ConnectionLost):
        echo.call("die")

    session.stop(echo.ref.name)

    with pytest.raises(ActorNotFound):
        session.actor(echo.ref.name, timeout_s=0.1)


def test_the_name_of_an_actor_that_has_failed_is_freed(session: Session, spawn: Spawn) -> None:
    echo = spawn(actor("Echo", restart=NEVER, essential=False))
    with pytest.raises(ConnectionLost):
        echo.call("die")
    with pytest.raises(ActorDied):
        session.actor(echo.ref.name)

    session.stop(echo.ref.name)

    with pytest.raises(ActorNotFound):
        session.actor(echo.ref.name, timeout_s=0.1)


@pytest.mark.slow
def test_an_actor_that_does_not_stop_in_time_ends_later(session: Session, spawn: Spawn) -> None:
    stubborn = spawn(actor("Echo", grace_s=1.0))
    stubborn.call("ignore_sigterm")

    late = pytest.raises(DeadlineExceeded, match=r"actor-\d+ has not ended within 0.1 s")
    with all_end([stubborn.call("pid")]), late:
        session.stop(stubborn.ref.name, timeout_s=0.1)


# -- restart -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_restart_replaces_the_process_and_all_below_it(
    session: Session, shared: SessionFactory, spawn: Spawn
) -> None:
    echo = spawn(actor("Echo", kwargs={"greeting": "hi"}))
    first = echo.call("who")

    with all_end([first["pid"], *echo.call("fork_family")], within_s=0.0):
        again = session.restart(echo.ref.name)

    second = again.call("who")
    assert (first["incarnation"], second["incarnation"]) == (1, 2)
    assert second["greeting"] == "hi"
    assert echo.call("who") == second
    assert was_reported(shared, echo, "#1 has ended: restarting it, as asked")


@pytest.mark.slow
def test_a_plain_call_is_lost_by_a_restart_and_an_idempotent_one_is_answered_after_it(
    session: Session, spawn: Spawn, threads: ThreadPoolExecutor
) -> None:
    echo = spawn(actor("Echo"))
    first = echo.call("pid")
    plain = threads.submit(echo.call, "sleep", 60.0, timeout_s=60.0)
    idempotent = threads.submit(echo.call, "wait_for_incarnation", 2, timeout_s=60.0)
    wait_until(lambda: echo.call("num_waiting") == 2)

    session.restart(echo.ref.name)

    with pytest.raises(ConnectionLost, match=r"actor-\d+#1@.* went away before it answered$"):
        plain.result(60.0)
    assert idempotent.result(60.0) not in (first, None)


@pytest.mark.slow
def test_a_restart_is_no_failure_for_the_restart_policy(session: Session, spawn: Spawn) -> None:
    echo = spawn(actor("Echo", restart=NEVER, essential=False))

    session.restart(echo.ref.name)
    session.restart(echo.ref.name)

    assert echo.call("who")["incarnation"] == 3
    with pytest.raises(ConnectionLost):
        echo.call("leave", 3)
    with pytest.raises(ActorDied, match=r"#3 .*exited with status 3"):
        session.restart(echo.ref.name)


@pytest.mark.slow
def test_a_restart_does_not_wait_for_the_delay_of_the_policy(
    session: Session, spawn: Spawn
) -> None:
    echo = spawn(actor("Echo", restart=LATER))
    with pytest.raises(ConnectionLost):
        echo.call("die")

    assert session.restart(echo.ref.name).ref.incarnation == 2


@pytest.mark.slow
def test_a_process_that_is_still_starting_is_replaced(
    session: Session, spawn: Spawn, threads: ThreadPoolExecutor
) -> None:
    slow = actor("SlowFirstStart")
    spawned = threads.submit(spawn, slow)
    wait_until(lambda: row_of(session, slow.name).get("pid", 0) > 0)
    first = row_of(session, slow.name)

    restarted = session.restart(slow.name)

    assert (first["state"], first["incarnation"]) == ("STARTING", 1)
    assert spawned.result(60.0).ref == restarted.ref
    assert restarted.ref.incarnation == 2


@pytest.mark.slow
def test_a_restart_whose_process_fails_is_left_to_the_restart_policy(
    session: Session, spawn: Spawn, tmp_path: Path
) -> None:
    kwargs = {"marker_path": str(tmp_path / "marker")}
    echo = spawn(actor("FailsWhenAgain", kwargs=kwargs, essential=False))

    with pytest.raises(ActorDied, match=r"#4 failed to start(.|\n)*the disk is full"):
        session.restart(echo.ref.name)


@pytest.mark.slow
def test_a_restart_that_is_late_continues(session: Session, spawn: Spawn) -> None:
    stubborn = spawn(actor("Echo", grace_s=1.0))
    stubborn.call("ignore_sigterm")

    with pytest.raises(DeadlineExceeded, match=r"was not restarted within 0.1 s"):
        session.restart(stubborn.ref.name, timeout_s=0.1)

    wait_until(lambda: row_of(session, stubborn.ref.name)["incarnation"] == 2)
    assert stubborn.call("pid", timeout_s=60.0) == row_of(session, stubborn.ref.name)["pid"]


# -- engines of pools, and other nodes -----------------------------------------------------


@pytest.mark.slow
def test_an_engine_of_a_pool_is_restarted_but_not_stopped(umbra_session: Session) -> None:
    pool = umbra_session.create_pool(spec("policy"))

    with pytest.raises(ConfigError, match=r"policy-0 belongs to pool 'policy'"):
        umbra_session.stop("policy-0")
    umbra_session.restart("policy-0")

    wait_until(lambda: pool.states()[0]["state"] == "SERVING")
    (state,) = pool.states()
    assert (state["incarnation"], state["num_restarts"]) == (2, 1)


@pytest.mark.slow
def test_an_actor_of_another_node_is_restarted_and_stopped_there(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    session = umbra_session_factory(tcp_host="127.0.0.1")
    with JoinedNode(tmp_path, ["--join", str(umbra_session_factory.run_dirs[0])]) as node:
        node.wait_for_text("joined as node 1")
        far = session.spawn(actor("Echo", restart=NEVER, essential=False), node=1)
        name, first = far.ref.name, far.call("pid")

        with all_end([first], within_s=0.0):
            session.restart(name)
        second = far.call("pid", timeout_s=60.0)
        with all_end([second], within_s=0.0):
            session.stop(name)
        with pytest.raises(ActorNotFound):
            session.actor(name, timeout_s=0.1)

        again = session.spawn(actor("Echo", name, restart=NEVER, essential=False), node=1)
        assert again.ref.incarnation == 3
        kill(again.call("pid"))
        for _ in ("which may not have been reported yet", "which has been"):
            with pytest.raises(ActorDied, match="killed by SIGKILL"):
                session.restart(name)
        os.kill(node.process.pid, signal.SIGINT)
        assert node.wait() == 128 + signal.SIGINT
