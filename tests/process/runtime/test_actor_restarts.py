"""Actors that end: replaced or failed, and cleaned up."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from actor_specs import NEVER, SOON, actor
from watched_actors import Spawn, wait_for_incarnation, was_reported
from watching import all_end, kill

from umbra.runtime.errors import ActorDied, ConnectionLost, JobFailed
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.session import Session
from umbra.runtime.testing.factories import SessionFactory

pytestmark = pytest.mark.process


def call_until_the_job_fails(handle: SyncHandle, method: str, *args: object) -> str:
    """The message with which the session ends; until then calls may find their actor dead."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        try:
            handle.call(method, *args, timeout_s=60.0)
        except (ConnectionLost, ActorDied):
            continue
        except JobFailed as error:
            return str(error)
    raise AssertionError("the job did not fail")


@pytest.mark.slow
def test_an_actor_that_is_killed_in_its_first_start_is_started_again(
    shared: SessionFactory, spawn: Spawn
) -> None:
    echo = spawn(actor("KilledAtStart", kwargs={"signum": signal.SIGKILL, "times": 2}))

    assert echo.call("who")["incarnation"] == 3
    for incarnation in (1, 2):
        name = f"{echo.ref.name}#{incarnation}"
        assert was_reported(shared, echo, f"{name} failed to start: {name} (pid ")
        assert was_reported(shared, echo, "killed by SIGKILL (9); restarting it in")


@pytest.mark.slow
def test_an_actor_that_is_killed_in_every_start_fails(spawn: Spawn) -> None:
    ends = r"#3 failed to start(.|\n)*SIGKILL(.|\n)*start 3(.|\n)*after 2 restarts within"
    with pytest.raises(ActorDied, match=ends):
        spawn(actor("KilledAtStart", kwargs={"signum": signal.SIGKILL, "times": 9}))


def test_a_crash_of_its_own_in_the_first_start_is_not_tried_again(spawn: Spawn) -> None:
    with pytest.raises(ActorDied, match=r"#1 failed to start(.|\n)*SIGSEGV(.|\n)*start 1"):
        spawn(actor("KilledAtStart", kwargs={"signum": signal.SIGSEGV, "times": 9}))


@pytest.mark.slow
def test_a_crash_loop_fails_the_job_with_signal_and_last_lines(umbra_session: Session) -> None:
    echo = umbra_session.spawn(actor("DiesSoon"))

    message = call_until_the_job_fails(echo, "sleep", 60.0)

    assert f"{echo.ref.name} failed: {echo.ref.name}#3" in message
    assert "killed by SIGKILL (9)" in message
    assert "incarnation 3 was here" in message
    assert "after 2 restarts within" in message


def test_a_run_method_that_raises_ends_the_actor(umbra_session: Session) -> None:
    echo = umbra_session.spawn(actor("DiesInRun", restart=NEVER))

    message = call_until_the_job_fails(echo, "sleep", 60.0)

    assert "RuntimeError: the replay store is corrupt" in message
    assert "exited with status 1" in message


@pytest.mark.slow
def test_an_actor_that_cannot_come_back_fails_the_job(
    umbra_session: Session, tmp_path: Path
) -> None:
    kwargs = {"marker_path": str(tmp_path / "marker")}
    echo = umbra_session.spawn(actor("FailsWhenAgain", kwargs=kwargs))

    message = call_until_the_job_fails(echo, "leave", 3)

    assert f"failed: {echo.ref.name}#3 failed to start: RuntimeError: the disk is full" in message
    assert "exited with status 1, after 2 restarts within" in message


def test_an_actor_that_is_not_essential_may_die(spawn: Spawn) -> None:
    echo = spawn(actor("Echo", restart=NEVER, essential=False))

    with pytest.raises(ConnectionLost):
        echo.call("leave", 3)
    with pytest.raises(ActorDied, match="exited with status 3"):
        echo.call("echo", 1, timeout_s=30.0)

    assert spawn(actor("Echo")).call("echo", 1) == 1


ENDS = {
    "exit status 0": ("leave", 0, "exited with status 0"),
    "cancelled main task": ("cancel", "main", "exited with status 1"),
    "all tasks cancelled": ("cancel", "all", "exited with status 1"),
    "SIGTERM": ("signal", signal.SIGTERM, "stopped by SIGTERM (exit status 143)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_an_end_that_nobody_asked_for_is_reported_and_the_actor_replaced(
    session: Session, shared: SessionFactory, spawn: Spawn, how: str
) -> None:
    method, argument, status = ENDS[how]
    echo = spawn(actor("Echo"))
    echo.call("write", "its log")

    with contextlib.suppress(ConnectionLost):
        echo.call(method, argument)
    wait_for_incarnation(session, 2, echo.ref.name)

    assert was_reported(shared, echo, f"{echo.ref.name}#1 (pid ")
    assert was_reported(shared, echo, f"{status}; restarting it in ")


def test_an_end_that_nobody_asked_for_is_final_where_nothing_is_restarted(
    umbra_session: Session,
) -> None:
    echo = umbra_session.spawn(actor("LeavesSoon", restart=NEVER))

    message = call_until_the_job_fails(echo, "sleep", 60.0)

    assert f"{echo.ref.name} failed: {echo.ref.name}#1 (pid " in message
    assert "exited with status 0" in message


@pytest.mark.slow
def test_a_handle_asked_for_right_after_a_kill_is_the_successors(
    session: Session, spawn: Spawn
) -> None:
    echo = spawn(actor("Echo", restart=replace(SOON, max_restarts=20)))

    for incarnation in range(1, 5):
        pid = session.actor(echo.ref.name).call("pid")
        os.kill(pid, signal.SIGKILL)
        handle = session.actor(echo.ref.name)
        assert handle.ref.incarnation == incarnation + 1


@pytest.mark.slow
def test_children_of_a_killed_actor_go_with_it_and_others_stay(
    session: Session, spawn: Spawn
) -> None:
    doomed = spawn(actor("Echo"))
    spared = spawn(actor("Echo"))
    family = doomed.call("fork_family")
    spared_family = spared.call("fork_family")

    with all_end(family):
        kill(doomed.call("who")["pid"])
    wait_for_incarnation(session, 2, doomed.ref.name)

    for pid in spared_family:
        os.kill(pid, 0)


@pytest.mark.slow
def test_names_of_shared_memory_go_with_a_killed_actor(session: Session, spawn: Spawn) -> None:
    doomed = spawn(actor("Echo"))
    names = doomed.call("make_names", timeout_s=60.0)
    assert {name[:4] for name in names} == {"psm_", "sem."}

    kill(doomed.call("who")["pid"])
    wait_for_incarnation(session, 2, doomed.ref.name)

    assert not set(names) & set(os.listdir("/dev/shm"))


def test_an_actor_that_is_deaf_to_sigterm_is_killed_after_its_grace(
    session: Session, spawn: Spawn
) -> None:
    echo = spawn(actor("Echo", grace_s=0.3))
    echo.call("ignore_sigterm")

    with all_end([echo.call("who")["pid"]]):
        session.stop(echo.ref.name)
