"""The saboteur hits whom it means, and counts what it has seen."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from chaos_plan import POOL, Fault, Role
from chaos_saboteur import DeathNotes, Saboteur
from chaos_victim import Victim

from umbra.runtime.actor.restart_policy import RestartPolicy
from umbra.runtime.cluster.environment import ACTOR_VARIABLE
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.session.session import Session
from umbra.runtime.testing.factories import SessionFactory

pytestmark = pytest.mark.process

DEADLINE_S = 60.0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that passes for life 3 of `sleeper`, and has set itself up."""
    command = "print(flush=True); import time; time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", command],
        env={**os.environ, ACTOR_VARIABLE: "sleeper#3"},
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_victim_is_seen_to_stop_go_on_and_end(sleeper: subprocess.Popen[bytes]) -> None:
    with Victim("sleeper#3", sleeper.pid) as victim:
        assert not victim.is_stopped()

        victim.send(signal.SIGSTOP)
        assert victim.is_stopped(DEADLINE_S)
        assert not victim.has_ended()

        victim.send(signal.SIGKILL)
        assert victim.has_ended(DEADLINE_S)
        assert not victim.is_stopped()


@pytest.mark.parametrize("label", ["sleeper#2", "sleeper#33", "sleep"])
def test_another_incarnation_is_not_a_victim(sleeper: subprocess.Popen[bytes], label: str) -> None:
    with pytest.raises(ProcessLookupError, match=f"is not {label}"):
        Victim(label, sleeper.pid)

    assert sleeper.poll() is None


def test_a_process_that_has_ended_is_not_a_victim(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # its pid stays its own

    with pytest.raises(ProcessLookupError):
        Victim("sleeper#3", sleeper.pid)


def start_engine(session: Session) -> None:
    restart = RestartPolicy(mode="on_failure", backoff_initial_s=0.05)
    session.create_pool(
        PoolSpec(
            name=POOL,
            engine="umbra.engines.echo.echo_engine:EchoEngine",
            count=1,
            restart=restart,
            hung_limit_s=2.0,
        )
    )


@pytest.mark.slow
def test_faults_are_counted_once_they_are_seen(umbra_session_factory: SessionFactory) -> None:
    session = umbra_session_factory()
    start_engine(session)
    faults = [
        Fault(kind="pause", after_finished=1, lasts_s=0.2, hits_any=True),
        Fault(kind="kill", after_finished=2, hits_any=True),
        Fault(kind="stop", phase="update", hits_any=True),
    ]
    num_replaced = 0

    def num_finished() -> int:
        return num_replaced + len(saboteur.continued)

    saboteur = Saboteur(session, {f"{POOL}-0": "engine"}, faults, random.Random(1), num_finished)

    with saboteur:
        with saboteur.during("update", 0):
            session.supervisor_call("resolve", f"{POOL}-0", DEADLINE_S, 1)  # its successor
            num_replaced = 1
        saboteur.finish()

    lives = [(strike.kind, strike.label) for strike in saboteur.strikes]
    assert lives == [
        (kind, f"{POOL}-0#{life}")
        for kind, life in zip(("stop", "pause", "kill"), (1, 2, 2), strict=True)
    ]
    assert saboteur.summary()["kills"] == 3
    assert saboteur.continued == [f"{POOL}-0#2"]
    assert saboteur.fatal_labels() == {f"{POOL}-0#1", f"{POOL}-0#2"}
    session.supervisor_call("resolve", f"{POOL}-0", DEADLINE_S, 2)
    deaths = DeathNotes()
    for note in umbra_session_factory.notes:
        deaths.observe(note)
    assert set(deaths.how) == saboteur.fatal_labels()
    assert deaths.num_hung == 1
    assert deaths.crashes() == []


@pytest.mark.slow
def test_without_progress_nothing_is_struck(umbra_session: Session) -> None:
    start_engine(umbra_session)
    faults = [Fault(kind="kill", after_finished=1, hits_any=True)]

    victims: dict[str, Role] = {f"{POOL}-0": "engine"}
    with Saboteur(umbra_session, victims, faults, random.Random(1), lambda: 0) as saboteur:
        pass

    assert saboteur.strikes == []


@pytest.mark.slow
def test_what_goes_wrong_beside_the_run_is_raised(umbra_session: Session) -> None:
    def fail() -> int:
        raise LookupError("no progress known")

    faults = [Fault(kind="kill")]

    with (
        pytest.raises(LookupError, match="no progress known"),
        Saboteur(umbra_session, {}, faults, random.Random(1), fail) as saboteur,
    ):
        saboteur.finish()
