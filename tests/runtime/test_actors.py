"""Actors under supervision: how they start, fail, are replaced and are given up."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from actor_specs import ALWAYS, NEVER, SOON, actor
from watching import all_end, kill

from umbra.runtime.actor import ActorSpec
from umbra.runtime.errors import (
    ActorDied,
    ActorNotFound,
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    JobFailed,
    RemoteError,
)
from umbra.runtime.session import Session, SyncHandle
from umbra.runtime.testing.sessions import SessionFactory

pytestmark = pytest.mark.process

Spawn = Callable[[ActorSpec], SyncHandle]


def wait_for_incarnation(session: Session, incarnation: int, name: str) -> int:
    """The pid of that incarnation, once it is up."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        handle = session.actor(name, timeout_s=20.0)
        if handle.ref.incarnation >= incarnation:
            try:
                who = handle.call("who", timeout_s=5.0)
            except ConnectionLost:
                continue
            if who["incarnation"] >= incarnation:
                return int(who["pid"])
    raise AssertionError(f"{name} did not reach incarnation {incarnation}")


def call_until_the_job_fails(handle: SyncHandle, method: str, *args: object) -> str:
    """The message with which the session ends; until then calls may find their actor dead."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        try:
            handle.call(method, *args, timeout_s=20.0)
        except (ConnectionLost, ActorDied):
            continue
        except JobFailed as error:
            return str(error)
    raise AssertionError("the job did not fail")


def told(factory: SessionFactory, handle: SyncHandle, text: str) -> bool:
    """Whether an operator was told this of that actor."""
    return any(handle.ref.name in note and text in note for note in factory.notes)


# -- calls ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_actor_answers_streams_and_stops(session: Session, spawn: Spawn) -> None:
    echo = spawn(actor("Echo", kwargs={"greeting": "hi"}))

    assert echo.call("echo", {"a": [1, None, b"x"]}) == {"a": [1, None, b"x"]}
    assert list(echo.stream("count", 40, credits=4)) == list(range(40))
    who = echo.call("who")
    assert (who["name"], who["incarnation"], who["greeting"]) == (echo.ref.name, 1, "hi")

    with all_end([who["pid"]]):
        session.supervisor_call("stop", echo.ref.name, 10.0)
    with pytest.raises(ActorNotFound, match="no actor 'actor-"):
        echo.call("echo", 1, timeout_s=5.0)
    with pytest.raises(ActorNotFound, match="no actor 'actor-"):
        session.actor(echo.ref.name, timeout_s=0.2)


def test_a_remote_error_brings_its_traceback(spawn: Spawn) -> None:
    echo = spawn(actor("Echo"))

    with pytest.raises(RemoteError, match="ValueError: reward is NaN") as caught:
        echo.call("fail", "reward is NaN")

    assert "in fail\n" in caught.value.remote_traceback


def test_closing_a_stream_early_cancels_the_generator(spawn: Spawn) -> None:
    echo = spawn(actor("Echo"))
    items = echo.stream("count", 10**9, credits=2)

    assert [next(items) for _ in range(5)] == [0, 1, 2, 3, 4]
    items.close()

    assert echo.call("echo", 1) == 1


def test_a_deadline_cancels_the_call_at_the_actor(spawn: Spawn) -> None:
    echo = spawn(actor("Echo"))

    with pytest.raises(DeadlineExceeded, match=r"actor-\d+#1@.*\.sleep did not answer in"):
        echo.call("sleep", 60.0, timeout_s=0.1)

    assert echo.call("cancelled") == 1


def test_an_actor_calls_another(spawn: Spawn) -> None:
    first = spawn(actor("Echo"))
    second = spawn(actor("Echo"))

    assert first.call("ask", second.ref, "who")["name"] == second.ref.name


def test_environment_and_kwargs_reach_the_actor(spawn: Spawn) -> None:
    spec = actor("Echo", env={"CUDA_VISIBLE_DEVICES": "3"}, kwargs={"greeting": "moin"})

    echo = spawn(spec)

    assert echo.call("variable", "CUDA_VISIBLE_DEVICES") == "3"
    assert echo.call("variable", "UMBRA_ACTOR") == f"{echo.ref.name}#1"
    assert echo.call("who")["greeting"] == "moin"


def test_an_actor_is_no_rank(
    umbra_session_factory: SessionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchruns = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in torchruns.items():
        monkeypatch.setenv(name, value)
    session = umbra_session_factory()

    plain = session.spawn(actor("Echo"))
    told = session.spawn(actor("Echo", env={"MASTER_PORT": "2"}))

    assert [plain.call("variable", name) for name in torchruns] == [None, None, None]
    assert told.call("variable", "MASTER_PORT") == "2"


# -- starts that fail ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module:Echo", r"cannot import 'no_such_module'.*sys_path"),
        ("actors:NoSuchClass", r"has no class 'NoSuchClass'"),
        ("actors", r"'actors' must be written module:Class"),
    ],
)
def test_an_actor_that_cannot_be_imported_says_so(spawn: Spawn, target: str, message: str) -> None:
    spec = replace(actor("Echo"), target=target)

    with pytest.raises(ActorDied, match=message):
        spawn(spec)


def test_an_actor_that_raises_at_start_brings_its_traceback(spawn: Spawn) -> None:
    with pytest.raises(ActorDied, match="ValueError: no such model") as caught:
        spawn(actor("RaisesAtStart"))

    assert "in __init__" in str(caught.value)


def test_an_actor_that_dies_at_start_brings_its_status_and_last_words(
    spawn: Spawn,
) -> None:
    with pytest.raises(ActorDied, match=r"exited with status 7(.|\n)*last words"):
        spawn(actor("ExitsAtStart"))


@pytest.mark.slow
def test_an_actor_that_never_comes_up_is_given_up(spawn: Spawn) -> None:
    spec = actor("SlowStart", start_timeout_s=0.7, grace_s=0.5)

    with pytest.raises(ActorDied, match=r"start_timeout_s = 0.7(.|\n)*starting for ever"):
        spawn(spec)


@pytest.mark.slow
def test_an_actor_that_is_killed_in_its_first_start_is_started_again(
    shared: SessionFactory, spawn: Spawn
) -> None:
    echo = spawn(actor("KilledAtStart", kwargs={"signum": signal.SIGKILL, "times": 2}))

    assert echo.call("who")["incarnation"] == 3
    for incarnation in (1, 2):
        name = f"{echo.ref.name}#{incarnation}"
        assert told(shared, echo, f"{name} failed to start: {name} (pid ")
        assert told(shared, echo, "killed by SIGKILL (9); restarting it in")


@pytest.mark.slow
def test_an_actor_that_is_killed_in_every_start_is_given_up(spawn: Spawn) -> None:
    ends = r"#3 failed to start(.|\n)*SIGKILL(.|\n)*start 3(.|\n)*after 2 restarts within"
    with pytest.raises(ActorDied, match=ends):
        spawn(actor("KilledAtStart", kwargs={"signum": signal.SIGKILL, "times": 9}))


def test_a_crash_of_its_own_in_the_first_start_is_not_tried_again(spawn: Spawn) -> None:
    with pytest.raises(ActorDied, match=r"#1 failed to start(.|\n)*SIGSEGV(.|\n)*start 1"):
        spawn(actor("KilledAtStart", kwargs={"signum": signal.SIGSEGV, "times": 9}))


def test_a_failed_start_leaves_the_name_free_and_the_job_alive(spawn: Spawn) -> None:
    with pytest.raises(ActorDied):
        spawn(actor("RaisesAtStart", "again"))

    echo = spawn(actor("Echo", "again"))

    assert echo.call("echo", 1) == 1


def test_a_name_that_is_taken_is_refused(spawn: Spawn) -> None:
    spawn(actor("Echo", "taken"))

    with pytest.raises(ConfigError, match="'taken' exists already"):
        spawn(actor("Echo", "taken"))


def test_a_name_used_again_goes_on_counting_incarnations(session: Session, spawn: Spawn) -> None:
    old = spawn(actor("Echo", "counting"))
    session.supervisor_call("stop", "counting", 10.0)

    new = spawn(actor("Echo", "counting"))

    assert (old.ref.incarnation, new.ref.incarnation) == (1, 2)
    assert old.ref.ipc_endpoint != new.ref.ipc_endpoint


@pytest.mark.parametrize("name", ["a/b", "..", "x" * 90, "supervisor", "a b"])
def test_a_name_that_cannot_be_a_file_is_refused(spawn: Spawn, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        spawn(actor("Echo", name))


def test_a_constructor_that_forks_does_not_delay_the_start(session: Session, spawn: Spawn) -> None:
    echo = spawn(actor("ForksAtStart", start_timeout_s=10.0))

    with all_end(echo.call("family")):
        session.supervisor_call("stop", echo.ref.name, 10.0)


# -- ends and restarts ---------------------------------------------------------------------


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
        echo.call("echo", 1, timeout_s=5.0)

    assert spawn(actor("Echo")).call("echo", 1) == 1


def test_an_actor_that_ends_well_is_not_restarted_on_failure(spawn: Spawn) -> None:
    echo = spawn(actor("Echo", restart=SOON))

    with pytest.raises(ConnectionLost):
        echo.call("leave", 0)
    with pytest.raises(ActorDied, match="exited normally"):
        echo.call("echo", 1, timeout_s=5.0)


def test_an_actor_that_is_to_live_always_is_restarted_after_a_good_end(
    spawn: Spawn,
) -> None:
    echo = spawn(actor("Echo", restart=ALWAYS))

    with pytest.raises(ConnectionLost):
        echo.call("leave", 0)

    assert echo.call("who", timeout_s=20.0)["incarnation"] == 2


@pytest.mark.slow
def test_a_plain_call_fails_once_then_reaches_the_next_incarnation(
    spawn: Spawn,
) -> None:
    echo = spawn(actor("Echo"))
    pid = echo.call("who")["pid"]

    with pytest.raises(ConnectionLost, match=r"actor-\d+#1@"):
        echo.call("die", timeout_s=20.0)

    who = echo.call("who", timeout_s=20.0)
    assert who["incarnation"] == 2
    assert who["pid"] != pid


@pytest.mark.slow
def test_an_idempotent_call_survives_its_actor(spawn: Spawn) -> None:
    echo = spawn(actor("Echo", restart=ALWAYS))
    first = echo.call("pid")

    for _ in range(3):
        with all_end([first]):
            kill(first)
            second = echo.call("pid", timeout_s=20.0)
        assert second != first
        first = second


@pytest.mark.slow
def test_a_stale_reference_is_refused(session: Session, spawn: Spawn) -> None:
    echo = spawn(actor("Echo"))
    asking = spawn(actor("Echo"))
    old = echo.ref
    kill(echo.call("who")["pid"])
    wait_for_incarnation(session, 2, echo.ref.name)

    new = session.actor(echo.ref.name).ref
    stale = replace(old, ipc_endpoint=new.ipc_endpoint)

    assert new.incarnation == 2
    assert new.ipc_endpoint != old.ipc_endpoint
    with pytest.raises(ActorNotFound, match="stale: incarnation 2 is here"):
        asking.call("ask", stale, "who")


def test_restarts_are_told(session: Session, shared: SessionFactory, spawn: Spawn) -> None:
    echo = spawn(actor("Echo"))

    kill(echo.call("who")["pid"])
    wait_for_incarnation(session, 2, echo.ref.name)

    (note, *_) = [note for note in shared.notes if f"{echo.ref.name}#1" in note]
    assert "killed by SIGKILL (9)" in note
    assert "restarting" in note


# -- hung, busy, too large -----------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_actor_counts_as_hung_and_is_replaced(
    session: Session, shared: SessionFactory, spawn: Spawn
) -> None:
    echo = spawn(actor("Echo", hung_limit_s=0.5))
    pid = echo.call("who")["pid"]

    with all_end([pid], within_s=5.0):
        kill(pid, signal.SIGSTOP)

    assert wait_for_incarnation(session, 2, echo.ref.name) != pid
    assert told(shared, echo, "no heartbeat for")


@pytest.mark.slow
def test_a_blocked_loop_is_busy_not_hung(spawn: Spawn) -> None:
    echo = spawn(actor("Echo", hung_limit_s=0.4, busy_limit_s=60.0))

    assert echo.call("block", 1.0, timeout_s=10.0) == "blocked"
    assert echo.call("who")["incarnation"] == 1


@pytest.mark.slow
def test_a_loop_blocked_for_too_long_is_replaced(
    session: Session, shared: SessionFactory, spawn: Spawn
) -> None:
    echo = spawn(actor("Echo", hung_limit_s=60.0, busy_limit_s=0.3))

    with pytest.raises(ConnectionLost):
        echo.call("block", 60.0, timeout_s=20.0)

    assert wait_for_incarnation(session, 2, echo.ref.name)
    assert told(shared, echo, "busy_limit_s = 0.3")


@pytest.mark.slow
def test_an_actor_above_its_memory_limit_is_replaced_and_the_limit_named(
    session: Session, shared: SessionFactory, spawn: Spawn
) -> None:
    echo = spawn(actor("Echo", memory_limit_nbytes=200 * 2**20))

    with contextlib.suppress(ConnectionLost):  # It may be killed before it has answered.
        echo.call("take_memory", 400 * 2**20)
    wait_for_incarnation(session, 2, echo.ref.name)

    assert told(shared, echo, "above its memory limit of 200 MiB")


@pytest.mark.slow
def test_memory_of_children_counts_and_what_they_share_counts_once(
    session: Session, shared: SessionFactory, spawn: Spawn
) -> None:
    echo = spawn(actor("Echo", memory_limit_nbytes=500 * 2**20))

    echo.call("share_memory", 200 * 2**20, 3, timeout_s=20.0)
    time.sleep(1.5)  # longer than between two looks
    assert echo.call("who")["incarnation"] == 1

    with contextlib.suppress(ConnectionLost):
        echo.call("take_memory_in_a_child", 600 * 2**20, timeout_s=20.0)
    wait_for_incarnation(session, 2, echo.ref.name)
    assert told(shared, echo, "above its memory limit of 500 MiB")


# -- an engine's health --------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_that_gets_nowhere_is_replaced_and_one_that_is_slow_or_idle_is_not(
    session: Session, shared: SessionFactory, spawn: Spawn
) -> None:
    engines = [spawn(actor("Engine", role="engine", stall_limit_s=0.6)) for _ in range(3)]
    stuck, slow, idle = engines

    slow.call("work", is_stuck=False)
    stuck.call("work", is_stuck=True)

    wait_for_incarnation(session, 2, stuck.ref.name)
    assert told(shared, stuck, "made no token (pool.stall_limit_s = 0.6)")
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

    with all_end(children[:1], within_s=10.0):
        wait_for_incarnation(session, 2, engine.ref.name)
    assert told(shared, engine, f"its process {children[0]} was stopped by a signal")
    assert other.call("who")["incarnation"] == 1


def test_an_engine_that_fails_is_gone_at_once_for_who_asks_for_its_successor(
    session: Session, spawn: Spawn
) -> None:
    engine = spawn(actor("DiesSlowly", role="engine", restart=NEVER, essential=False))
    engine.call("give_up")

    with pytest.raises(ActorDied, match="exited with status 1") as caught:
        session.supervisor_call("resolve", engine.ref.name, 20.0, engine.ref.incarnation)
    assert "RuntimeError: the scheduler has ended" in str(caught.value).partition("first error")[2]


# -- what an actor leaves ------------------------------------------------------------------


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
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_names_of_shared_memory_go_with_a_killed_actor(
    session: Session, spawn: Spawn, signum: signal.Signals
) -> None:
    doomed = spawn(actor("Echo", hung_limit_s=0.5))  # who is stopped is killed by its supervisor
    names = doomed.call("make_names", timeout_s=20.0)
    assert {name[:4] for name in names} == {"psm_", "sem."}

    kill(doomed.call("who")["pid"], signum)
    wait_for_incarnation(session, 2, doomed.ref.name)

    assert not set(names) & set(os.listdir("/dev/shm"))


def test_an_actor_that_is_deaf_to_sigterm_is_killed_after_its_grace(
    session: Session, spawn: Spawn
) -> None:
    echo = spawn(actor("Echo", grace_s=0.3))
    echo.call("ignore_sigterm")

    with all_end([echo.call("who")["pid"]], within_s=5.0):
        session.supervisor_call("stop", echo.ref.name, 10.0)


@pytest.mark.slow
def test_output_of_every_incarnation_is_in_the_log(
    session: Session, shared: SessionFactory, spawn: Spawn
) -> None:
    echo = spawn(actor("Echo"))
    echo.call("write", "first life")
    kill(echo.call("who")["pid"])
    wait_for_incarnation(session, 2, echo.ref.name)
    session.actor(echo.ref.name).call("write", "second life")

    name = echo.ref.name
    log = (shared.run_dirs[0] / "logs" / f"{name}.log").read_text()

    for text in (f"==== {name}#1", "first life", "FIRST LIFE", f"==== {name}#2", "SECOND LIFE"):
        assert text in log
