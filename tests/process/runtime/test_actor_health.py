"""Actors that are hung, busy or too large, and engines that get nowhere, are replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
from actor_specs import NEVER, actor
from watched_actors import Spawn, wait_for_incarnation, was_reported
from watching import all_end, kill

from umbra.runtime.errors import ActorDied, ConnectionLost
from umbra.runtime.session.session import Session
from umbra.runtime.testing.factories import SessionFactory

pytestmark = pytest.mark.process


@pytest.mark.slow
def test_a_stopped_actor_counts_as_hung_and_is_replaced(
    session: Session, shared: SessionFactory, spawn: Spawn
) -> None:
    echo = spawn(actor("Echo", hung_limit_s=0.5))
    pid = echo.call("who")["pid"]

    with all_end([pid]):
        kill(pid, signal.SIGSTOP)

    assert wait_for_incarnation(session, 2, echo.ref.name) != pid
    assert was_reported(shared, echo, "was killed: it was stopped by a signal: no heartbeat for")


@pytest.mark.slow
def test_a_blocked_loop_is_busy_not_hung(spawn: Spawn) -> None:
    echo = spawn(actor("Echo", hung_limit_s=1.5, busy_limit_s=60.0))  # a beat takes milliseconds

    assert echo.call("block", 3.0, timeout_s=60.0) == "blocked"
    assert echo.call("who")["incarnation"] == 1


@pytest.mark.slow
def test_a_loop_blocked_for_too_long_is_replaced(
    session: Session, shared: SessionFactory, spawn: Spawn
) -> None:
    echo = spawn(actor("Echo", hung_limit_s=60.0, busy_limit_s=0.3))

    with pytest.raises(ConnectionLost):
        echo.call("block", 60.0, timeout_s=60.0)

    assert wait_for_incarnation(session, 2, echo.ref.name)
    assert was_reported(shared, echo, "busy_limit_s = 0.3")


@pytest.mark.slow
def test_an_actor_above_its_memory_limit_is_replaced_and_the_limit_named(
    session: Session, shared: SessionFactory, spawn: Spawn
) -> None:
    echo = spawn(actor("Echo", memory_limit_nbytes=200 * 2**20))

    with contextlib.suppress(ConnectionLost):  # It may be killed before it has answered.
        echo.call("take_memory", 400 * 2**20)
    wait_for_incarnation(session, 2, echo.ref.name)

    assert was_reported(shared, echo, "above its memory limit of 200 MiB: raise the limit")


@pytest.mark.slow
def test_memory_of_children_counts_and_what_they_share_counts_once(
    session: Session, shared: SessionFactory, spawn: Spawn
) -> None:
    echo = spawn(actor("Echo", memory_limit_nbytes=500 * 2**20))

    echo.call("share_memory", 200 * 2**20, 3, timeout_s=60.0)
    time.sleep(1.5)  # longer than between two looks
    assert echo.call("who")["incarnation"] == 1

    with contextlib.suppress(ConnectionLost):
        echo.call("take_memory_in_a_child", 600 * 2**20, timeout_s=60.0)
    wait_for_incarnation(session, 2, echo.ref.name)
    assert was_reported(shared, echo, "above its memory limit of 500 MiB")


@pytest.mark.slow
def test_an_engine_that_gets_nowhere_is_replaced_and_one_that_is_slow_or_idle_is_not(
    session: Session, shared: SessionFactory, spawn: Spawn
) -> None:
    engines = [spawn(actor("Engine", role="engine", stall_limit_s=2.0)) for _ in range(3)]
    stuck, slow, idle = engines

    slow.call("work", is_stuck=False)
    stuck.call("work", is_stuck=True)

    wait_for_incarnation(session, 2, stuck.ref.name)
    assert was_reported(shared, stuck, "made no token (pool.stall_limit_s = 2)")
    assert slow.call("who")["incarnation"] == idle.call("who")["incarnation"] == 1


@pytest.mark.slow
def test_an_engine_with_a_stopped_process_is_replaced_and_other_actors_are_not(
    session: Session, shared: SessionFactory, spawn: Spawn
) -> None:
    engine = spawn(actor("Engine", role="engine", stall_limit_s=60.0, hung_limit_s=1.0))
    other = spawn(actor("Echo", hung_limit_s=1.0))
    children = [handle.call("fork_family")[0] for handle in (engine, other)]
    time.sleep(2.6)  # until the processes below are looked for again

    for pid in children:
        os.kill(pid, signal.SIGSTOP)

    with all_end(children[:1]):
        wait_for_incarnation(session, 2, engine.ref.name)
    stopped = f"its process {children[0]} was stopped by a signal: it did not continue within 1 s"
    assert was_reported(shared, engine, stopped)
    assert other.call("who")["incarnation"] == 1


def test_an_engine_that_fails_is_gone_at_once_for_who_asks_for_its_successor(
    session: Session, spawn: Spawn
) -> None:
    engine = spawn(actor("DiesSlowly", role="engine", restart=NEVER, essential=False))
    engine.call("give_up")

    with pytest.raises(ActorDied, match="exited with status 1") as caught:
        session.supervisor_call("resolve", engine.ref.name, 20.0, engine.ref.incarnation)
    assert "RuntimeError: the scheduler has ended" in str(caught.value).partition("first error")[2]
