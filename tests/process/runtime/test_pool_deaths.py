"""Engines of a pool that are killed: the notes describe how they ended."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from pools_in_turn import spec, wait_until

from umbra.runtime.actor.restart_policy import RestartPolicy
from umbra.runtime.session.session import Session

pytestmark = [pytest.mark.process, pytest.mark.slow]

NUM_KILLS = 10


def test_an_engine_killed_as_it_is_paused_was_not_killed_for_that(
    umbra_session: Session, tmp_path: Path
) -> None:
    soon = RestartPolicy(max_restarts=NUM_KILLS, backoff_initial_s=0.01, backoff_max_s=0.01)
    pool = umbra_session.create_pool(replace(spec("policy"), restart=soon))

    for life in range(1, NUM_KILLS + 1):
        (engine,) = umbra_session.supervisor_call("list_actors")
        os.kill(engine["pid"], signal.SIGKILL)
        pool.pause("abort")  # the call that finds the connection broken, half of the times
        wait_until(lambda life=life: pool.states()[0]["incarnation"] > life)
        pool.resume()
        wait_until(lambda: pool.states()[0]["state"] == "SERVING")

    (log,) = tmp_path.rglob("supervisor.log")
    ends = [line for line in log.read_text().splitlines() if "restarting it in" in line]
    assert len(ends) == NUM_KILLS
    assert [line for line in ends if "killed by SIGKILL (9)" not in line] == []


def test_an_engine_killed_because_it_did_not_answer_is_said_to_have_been_stopped(
    umbra_session: Session, tmp_path: Path
) -> None:
    pool = umbra_session.create_pool(spec("policy"))
    (engine,) = umbra_session.supervisor_call("list_actors")
    os.kill(engine["pid"], signal.SIGSTOP)

    pool.pause("abort", timeout_s=1.0)

    wait_until(lambda: pool.states()[0]["incarnation"] > 1)
    (log,) = tmp_path.rglob("supervisor.log")
    (end,) = [line for line in log.read_text().splitlines() if "restarting it in" in line]
    assert "policy-0#1 was killed: it was stopped by a signal: policy-0#1 failed at pause: " in end
