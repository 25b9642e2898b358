"""Machines that only generate: they join a running job, serve, leave, and are killed."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from joined_node import JoinedNode
from live_rollouts import VOCAB_SIZE, LiveRollouts, merged, while_generating
from test_live_rollouts import expected_completions
from watching import DEADLINE_S, all_end

from umbra.runtime.cli.umbra_command import main as umbra
from umbra.runtime.cluster.run_events import read_events
from umbra.runtime.cluster.run_requests import RunNotice
from umbra.runtime.reports.job_state import job_state
from umbra.runtime.rpc.curve_keys import CurveKeys
from umbra.runtime.testing.factories import SessionFactory

pytestmark = [pytest.mark.process, pytest.mark.slow]


MAX_STALENESS = 9
TOKENS_PER_S = 60.0
"""Of each trajectory, on however many engines."""


class OpenJob:
    """A job of one node that other machines can join, with one engine of its own."""

    def __init__(self, factory: SessionFactory, folder: Path, **changes: Any) -> None:
        self._factory = factory
        self._folder = folder
        session = factory(tcp_host="127.0.0.1")
        self.run_dir = factory.run_dirs[-1]
        changes.setdefault("engine", {"tokens_per_s": TOKENS_PER_S})
        # Batches are made with whatever weights there are.
        config = {"max_staleness": MAX_STALENESS}
        self.live = LiveRollouts(session, folder, num_engines=1, config=config, **changes)
        self.live.publish(1)

    def join(self, *more: str) -> JoinedNode:
        return JoinedNode(self._folder, ["--join", str(self.run_dir), *more])

    def wait_for_serving(self, name: str) -> None:
        """Returns once an engine serves; sends it the weights, again if a sync leaves it out."""

        def serves() -> bool:
            state = self.states().get(name)
            if state == "PENDING_WEIGHTS":
                self.live.publish(self.live.version)
            return state == "SERVING"

        self._wait(serves, lambda: (self.states(), self.notes()))

    def wait_for_note(self, text: str) -> None:
        self._wait(lambda: any(text in note for note in self._factory.notes), self.notes)

    def wait_for_events(self, kinds: list[str]) -> None:
        """The file is written a moment after the notes."""

        def seen() -> list[str]:
            return [event.kind for event in read_events(self.run_dir) if event.kind != "note"]

        self._wait(lambda: seen() == kinds, seen)

    def states(self) -> dict[str, str]:
        return {row["engine"]: row["state"] for row in self.live.session.pool("policy").states()}

    def notes(self) -> list[str]:
        return self._factory.notes

    def check_batch(self, step: int) -> None:
        samples = merged(self.live.next_batch(step))
        assert {name: s["completion"] for name, s in samples.items()} == expected_completions(step)

    def disturb(self, act: Callable[[], None]) -> None:
        """Acts while all trajectories that may be in flight generate, half of them on either node;
        checks them."""
        with while_generating(self.live, 200, act):
            for step in range(MAX_STALENESS + 1):
                self.check_batch(step)

    def _wait(self, look: Callable[[], bool], show: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not look():
            assert time.monotonic() < deadline, show()
            time.sleep(0.02)


@contextmanager
def joined(job: OpenJob) -> Generator[JoinedNode]:
    """A node whose engine serves. All its processes end with the block, and leave nothing."""
    with ExitStack() as stack:
        node = stack.enter_context(job.join())
        node.wait_for_text("joined as node")
        job.wait_for_serving("policy-1")
        processes = node.tree()
        assert len(processes) == 4, "the program, its guardian, its supervisor and an engine"
        stack.enter_context(all_end(processes))
        yield node


def test_a_low_soft_limit_of_open_files_does_not_bind_the_machine(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    job = OpenJob(umbra_session_factory, tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with joined(job) as node:
            limits = {resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] for pid in node.tree()}
            node.process.send_signal(signal.SIGTERM)
            node.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert limits == {min(hard, 262_144)}


def test_a_machine_joins_and_leaves_by_a_signal(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    job = OpenJob(umbra_session_factory, tmp_path)
    job.check_batch(0)

    with joined(job) as node:
        state = asyncio.run(job_state(job.run_dir))
        with while_generating(job.live, 50, lambda: node.process.send_signal(signal.SIGTERM)):
            job.check_batch(1)
        assert node.wait() == 128 + signal.SIGTERM, node.text()
        job.wait_for_note("which only generated, has left")

    assert list(job.states()) == ["policy-0"]
    job.live.publish(2)
    job.check_batch(2)
    # A later machine's engine has a name that none has had.
    with job.join() as other:
        other.wait_for_text("joined as node 2")
        job.wait_for_note("has joined to generate, and starts policy-2")
        job.wait_for_events(["joined", "left", "joined"])
    assert state is not None
    assert [node.name for node in state.nodes] == ["node-0", "node-1"]
    (actor,) = state.nodes[1].actors
    (_, engine) = state.engines[1]
    assert (actor.name, actor.pid, engine.pid) == ("policy-1", engine.pid, actor.pid)
    assert (engine.node_id, engine.running) == (state.nodes[1].node_id, 0)


def test_a_machine_leaves_when_it_is_drained_or_the_job_is_over(
    umbra_session_factory: SessionFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = OpenJob(umbra_session_factory, tmp_path)

    with joined(job) as node:
        for where in ("here", "elsewhere"):
            if where == "elsewhere":  # the request is left as a file
                hide_socket(job.run_dir)
            assert umbra(["drain", str(job.run_dir), "0"]) == 1
            assert "no node '0' that only generates; there are: 1 (" in capsys.readouterr().err
        statuses: list[int] = []
        drain = ["drain", str(job.run_dir), "1"]
        job.disturb(lambda: statuses.append(umbra(drain)))
        assert statuses == [0]
        assert node.wait() == 0, node.text()
        assert "left the job, as asked" in node.text()
    with job.join() as other:
        other.wait_for_text("joined as node 2")
        umbra_session_factory.close()
        assert other.wait() == 0, other.text()
        assert "the job is over" in other.text()


def hide_socket(run_dir: Path) -> None:
    """As another container sees the job of a run directory."""
    notice = RunNotice(run_dir)
    address = notice.address()
    assert address is not None
    notice.post(replace(address, socket_dir="/tmp/of-another-container"))


def test_a_machine_ends_with_a_job_that_fails(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    job = OpenJob(umbra_session_factory, tmp_path)

    with joined(job) as node:
        job.live.session.supervisor_call("fail_job", "rank 0", "loss is NaN")
        assert node.wait() == 1
        assert "rank 0 failed: loss is NaN" in node.text()


@pytest.mark.parametrize("which", [0, 2], ids=["program", "supervisor"])
def test_a_machine_of_which_a_process_is_killed_leaves(
    umbra_session_factory: SessionFactory, tmp_path: Path, which: int
) -> None:
    job = OpenJob(umbra_session_factory, tmp_path)

    with joined(job) as node:
        victim = node.tree()[which]
        job.disturb(lambda: os.kill(victim, signal.SIGKILL))
        job.wait_for_note("node 1 (")
        assert not any("it was silent" in note for note in job.notes()), job.notes()
        assert node.wait() != 0

    assert list(job.states()) == ["policy-0"]


def test_an_engine_of_a_machine_is_restarted_there(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    job = OpenJob(umbra_session_factory, tmp_path)

    with joined(job) as node:
        engine = node.tree()[-1]
        with while_generating(job.live, 50, lambda: os.kill(engine, signal.SIGKILL)):
            job.check_batch(0)
        job.wait_for_serving("policy-1")
        job.check_batch(1)
        node.process.send_signal(signal.SIGINT)
        assert node.wait() == 128 + signal.SIGINT


def test_a_machine_that_is_silent_is_lost_and_the_job_continues(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    job = OpenJob(umbra_session_factory, tmp_path)

    with joined(job) as node:
        processes = node.tree()

        def silence() -> None:
            for pid in processes:
                os.kill(pid, signal.SIGSTOP)

        job.disturb(silence)
        job.wait_for_note("cannot be reached any more: it was silent for")
        assert list(job.states()) == ["policy-0"]
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        assert node.wait() == 1, node.text()


def test_an_engine_that_cannot_start_there_ends_the_machines_part(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    needed = tmp_path / "needed"
    needed.touch()
    job = OpenJob(
        umbra_session_factory,
        tmp_path,
        pool={
            "engine": "needy_engine:NeedyEngine",
            "kwargs": {"needs": str(needed), "vocab_size": VOCAB_SIZE},
            "env": {"PYTHONPATH": os.pathsep.join(sys.path)},
        },
    )
    needed.unlink()

    with job.join() as node:
        assert node.wait() == 1, node.text()
        assert "FileNotFoundError" in node.text()
    job.wait_for_note("which only generated, has left")
    job.check_batch(0)


def test_what_cannot_work_is_explained(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    job = OpenJob(umbra_session_factory, tmp_path, pool={"transport": "tcp"})
    other_keys = tmp_path / "other-keys"
    CurveKeys.generate().save(other_keys)

    def refusal(*arguments: str) -> str:
        with JoinedNode(tmp_path, arguments) as node:
            assert node.wait(60.0) in (1, 2)
            return node.text()

    assert "does the file of keys here belong to the job" in refusal(
        "--join", str(job.run_dir), "--secret-file", str(other_keys)
    )
    assert "copy the job's file of keys here with mode 0600" in refusal(
        "--join", str(job.run_dir), "--secret-file", str(tmp_path / "none")
    )
    assert "give a job's run.dir, or HOST:PORT" in refusal("--join", str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    assert "no job listens at" in refusal("--join", str(tmp_path / "empty"), "--within", "0.1")
    shutil.rmtree(tmp_path / "empty")
    umbra_session_factory()  # which listens on no address
    assert "start it with UMBRA_HOST_ADDRESS" in refusal(
        "--join", str(umbra_session_factory.run_dirs[-1])
    )
    job.check_batch(0)
