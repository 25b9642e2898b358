"""Rollout workers on another node than the manager: they run user code, die, and are lost."""

from __future__ import annotations

import os
import re
import signal
import time
from itertools import count
from pathlib import Path

import pytest
from joined_node import JoinedNode
from live_rollouts import while_generating
from run_traces import command_of
from test_generation_nodes import OpenJob, joined
from watching import DEADLINE_S

from umbra.runtime.errors import ActorDied
from umbra.runtime.testing.factories import SessionFactory

pytestmark = [pytest.mark.process, pytest.mark.slow]


def open_job(factory: SessionFactory, folder: Path) -> OpenJob:
    """Its loops run in a worker on its own node, and in another one once that is started."""
    return OpenJob(factory, folder, agent="notes_its_process", later_workers=["rewards-1"])


def worker_of(node: JoinedNode) -> int:
    (pid,) = (pid for pid in node.tree() if any("rewards-1#" in w for w in command_of(pid)))
    return pid


def processes_of_loops(folder: Path) -> list[int]:
    """Where the loops that returned have run, in this order."""
    path = folder / "processes"
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def check_until_used(job: OpenJob, folder: Path, worker: int, first_step: int = 0) -> None:
    """Checks batches until a loop of that worker has returned. Each follows new weights, which let
    more loops begin: all that could may have run elsewhere before the worker was up."""
    deadline = time.monotonic() + DEADLINE_S
    for step in count(first_step):
        if worker in processes_of_loops(folder):
            return
        assert time.monotonic() < deadline, "it has got no loop"
        job.live.publish(step + 1)
        job.check_batch(step)


def test_a_worker_that_dies_on_another_node_is_restarted_there(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    job = open_job(umbra_session_factory, tmp_path)

    with joined(job) as node:
        job.live.start_worker("rewards-1", node=1)
        first = worker_of(node)
        with while_generating(job.live, 50, lambda: os.kill(first, signal.SIGKILL)):
            job.check_batch(0)
        job.wait_for_note("rewards-1#1 (pid")
        job.live.session.actor("rewards-1")  # which is up again
        own, second = job.live.processes()["rewards-0"]["pid"], worker_of(node)
        check_until_used(job, tmp_path, second, first_step=1)

        assert {own, second} <= {*processes_of_loops(tmp_path)}
        node.process.send_signal(signal.SIGINT)
        assert node.wait() == 128 + signal.SIGINT


def test_the_work_of_a_node_that_is_lost_is_done_elsewhere(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    job = open_job(umbra_session_factory, tmp_path)

    with joined(job) as node:
        job.live.start_worker("rewards-1", node=1)
        # Of a machine whose program is killed, everything ends at once.
        with while_generating(job.live, 50, node.process.kill):
            job.check_batch(0)
        job.wait_for_note("node 1 (")
        assert node.wait() != 0

    job.check_batch(1)  # and nothing waits for the worker that is gone
    assert job.live.processes()["rewards-0"]["pid"] in processes_of_loops(tmp_path)


def test_user_code_that_cannot_be_imported_on_a_node_is_reported_with_its_name(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    job = open_job(umbra_session_factory, tmp_path)

    with joined(job) as node:
        with pytest.raises(ActorDied, match="No module named 'not_there'") as caught:
            job.live.start_worker("rewards-1", node=1, agent="not_there:run")
        assert re.match(r"node 1 \(.+\): rewards-1#1 failed to start", str(caught.value))

        job.live.start_worker("rewards-1", node=1)  # the node still takes part
        check_until_used(job, tmp_path, worker_of(node))
        node.process.send_signal(signal.SIGINT)
        assert node.wait() == 128 + signal.SIGINT
