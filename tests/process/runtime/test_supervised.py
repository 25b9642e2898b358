"""One actor under supervision, and deaths of engines whose cause is told."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from actor_specs import NEVER, actor
from local_actors import lone_node
from pools_in_turn import spec, wait_until

from umbra.runtime.actor.actor_spec import RestartPolicy
from umbra.runtime.actor.node_context import NodeContext
from umbra.runtime.actor.supervised_actor import ActorState, SupervisedActor
from umbra.runtime.process import child_process, descendants
from umbra.runtime.process.child_process import ChildProcess
from umbra.runtime.process.process_end import PidWatch
from umbra.runtime.session.session import Session


async def run_to_its_end(folder: Path, undo: Callable[[], None]) -> SupervisedActor:
    """An actor that is not up in time, and is to be ended."""
    with lone_node(folder) as node:
        spec = actor("SlowStart", start_timeout_s=0.01, grace_s=0.01)
        started = SupervisedActor(spec, node, lambda _: None)
        try:
            async with asyncio.timeout(30.0):
                await started.run()
        finally:
            undo()
            gone = asyncio.Event()
            with PidWatch(started.pid, gone.set):
                descendants.kill_tree(started.pid)
                async with asyncio.timeout(30.0):
                    await gone.wait()
            await asyncio.sleep(0)  # it is reaped, too
    return started


def hang(_child: ChildProcess, _signal: int = 0) -> None:
    """Does nothing, like a hanging driver."""


@pytest.mark.process
def test_a_process_that_cannot_be_ended_fails_its_actor_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "_KILL_WAIT_S", 0.05)
    for method in ("kill", "send_signal"):
        monkeypatch.setattr(ChildProcess, method, hang)

    ended = asyncio.run(run_to_its_end(tmp_path, monkeypatch.undo))

    assert ended.state == ActorState.FAILED
    assert ended.has_process
    assert "was killed but does not end" in ended.failure


@pytest.mark.process
@pytest.mark.parametrize("has_run", [False, True], ids=["first start", "restart"])
def test_only_a_first_start_that_is_late_is_explained(tmp_path: Path, has_run: bool) -> None:
    explained: list[str] = []

    async def explain(why: str) -> str:
        explained.append(why)
        return "; stacks are in a file"

    async def main(node: NodeContext) -> SupervisedActor:
        spec = actor("SlowStart", start_timeout_s=0.01, grace_s=0.01, restart=NEVER)
        late = SupervisedActor(spec, node, lambda _: None, explain_late=explain)
        late.has_run = has_run
        async with asyncio.timeout(30.0):
            await late.run()
        return late

    with lone_node(tmp_path) as node:
        late = asyncio.run(main(node))

    assert late.state == ActorState.FAILED
    assert len(explained) == (not has_run)
    assert ("stacks are in a file" in late.failure) == (not has_run)


@pytest.mark.process
def test_a_lone_node_spares_the_other_children_of_the_tests(tmp_path: Path) -> None:
    """Such as the fork server, which tests of this process share."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        asyncio.run(run_to_its_end(tmp_path, lambda: None))
        still_runs = other.poll() is None
        other.communicate(b"\n")

    assert still_runs


NUM_KILLS = 10


@pytest.mark.process
@pytest.mark.slow
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


@pytest.mark.process
@pytest.mark.slow
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
