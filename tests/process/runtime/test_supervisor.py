"""Several ranks and their supervisor: who fails is named to all, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from pathlib import Path

import pytest
from rank_processes import Ranks
from watching import all_end, kill

from umbra.runtime.actor.job_rules import STOP_WINDOW_S
from umbra.runtime.cluster.run_requests import JobRequest, RunNotice, supervisor_ref
from umbra.runtime.errors import ActorNotFound, JobFailed
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.session.session import Session
from umbra.runtime.settings import to_wire
from umbra.runtime.supervisor.supervisor import Supervisor
from umbra.runtime.testing.factories import SessionFactory

pytestmark = pytest.mark.process


def assert_all_gone(socket_root: Path, within_s: float = 60.0) -> None:
    """The guardian removes its directory as its last act."""
    deadline = time.monotonic() + within_s
    while left := list(socket_root.iterdir()):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


@pytest.mark.slow
def test_every_rank_can_call_what_one_has_spawned(tmp_path: Path, socket_root: Path) -> None:
    with Ranks(tmp_path, socket_root, 3, "leave", 0) as ranks:
        assert ranks.wait() == [0, 0, 0]

        assert len(ranks.events("met")) == 3
    assert_all_gone(socket_root)


@pytest.mark.slow
def test_a_rank_that_raises_is_named_to_the_others(tmp_path: Path, socket_root: Path) -> None:
    with Ranks(tmp_path, socket_root, 2, "raise", 1) as ranks:
        statuses = ranks.wait()

        (failed,) = ranks.events("failed").values()
        assert failed["message"] == "rank 1 failed: ValueError: loss is NaN"
        assert sorted(statuses) == [1, 3]
    assert_all_gone(socket_root)


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_to_the_others_within_seconds(
    tmp_path: Path, socket_root: Path
) -> None:
    with Ranks(tmp_path, socket_root, 3, "block", 0) as ranks:
        ranks.wait_for("met", 3)
        pid = ranks.processes[0].pid

        begin = time.monotonic()
        with all_end(ranks.tree()):
            kill(pid)
            ranks.wait()

        failed = ranks.events("failed")
        assert len(failed) == 2
        for event in failed.values():
            assert f"rank 0 failed: its process (pid {pid}) ended" in event["message"]
            assert event["at"] - begin < 30.0
    assert_all_gone(socket_root)


@pytest.mark.slow
def test_a_rank_may_leave_before_the_others(tmp_path: Path, socket_root: Path) -> None:
    with Ranks(tmp_path, socket_root, 3, "early", 1) as ranks:
        assert ranks.wait() == [0, 0, 0]

        assert sorted(ranks.events("met again")) == [0, 2]


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [0, 1])
def test_a_rank_may_come_after_the_others_have_left(
    tmp_path: Path, socket_root: Path, chosen: int
) -> None:
    with Ranks(tmp_path, socket_root, 2, "late", chosen) as ranks:
        assert ranks.wait() == [0, 0]
    assert_all_gone(socket_root)


@pytest.mark.slow
def test_a_low_soft_limit_of_open_files_does_not_bind_the_job(
    tmp_path: Path, socket_root: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with Ranks(tmp_path, socket_root, 1, "block", 0) as ranks:
            ranks.wait_for("met", 1)

            limits = {resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] for pid in ranks.tree()}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert limits == {min(hard, 262_144)}
    assert_all_gone(socket_root)


async def ask_twice(run_dir: Path) -> list[str]:
    """Makes a request by a call and, a while later, by a file. Returns the kinds of events that a
    rank gets from the first until a note after the second."""
    notice = RunNotice(run_dir)
    while (address := notice.address()) is None:  # noqa: ASYNC110  a file has no event
        await asyncio.sleep(0.05)
    request = JobRequest(job=address.job, kind="stop")
    async with Client(address.node_id) as client, asyncio.timeout(20.0):
        handle = client.handle(supervisor_ref(address.node_id, Path(address.socket_dir)))
        rank = handle.stream("attach", 1, 2, os.getpid(), 1, False, timeout_s=None)
        async with rank as events:
            assert (await anext(events))["kind"] == "attached"
            await handle.call("request", to_wire(request))
            await asyncio.sleep(STOP_WINDOW_S + 0.1)  # from here on, another one would count
            notice.leave_request(request)
            while notice.take_answer(request) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await handle.call("note", "taken")
            kinds = [(await anext(events))["kind"] for _ in range(2)]
            await handle.call("detach", 1)
    return kinds


def test_a_request_that_comes_by_a_call_and_by_a_file_is_one(
    umbra_session_factory: SessionFactory,
) -> None:
    """A client that gets no answer to its call in time leaves the request as a file."""
    session = umbra_session_factory()

    assert asyncio.run(ask_twice(umbra_session_factory.run_dirs[0])) == ["signal", "note"]

    with pytest.raises(JobFailed, match="stopped by SIGTERM"):  # as in a session without a handler
        session.raise_if_lost()


CALLS = {
    "ranks": "attach detach fail_job join_job pass_on_signal serve_metrics",
    "supervisors": "admit bundle_late command_hosted end_warm hold_image host_actor join "
    "node_status report report_node",
    "programs": "generate job_state request",
    "the rollout manager": "note record",
    "actors": "list_actors resolve restart signalled spawn stop",
    "pools": "catch_up create_pool pool_has_work pool_pause pool_resume pool_sleep pool_states "
    "pool_wake sync watch_pool",
}
"""All that a supervisor answers, by who calls or what is called."""


def test_a_supervisor_answers_these_calls_and_no_other_of_its_methods(
    umbra_session: Session,
) -> None:
    listed = {name for names in CALLS.values() for name in names.split()}
    methods = {name for name in dir(Supervisor) if not name.startswith("_")} - listed

    assert {"end", "end_for", "run", "stop_job"} <= methods
    for name in methods:
        with pytest.raises(ActorNotFound, match=f"no method '{name}'; there are: ") as caught:
            umbra_session.supervisor_call(name, timeout_s=30.0)
        _, _, answered = str(caught.value).partition("there are: ")
        assert {each for each in answered.split(", ") if each[0] != "_"} == listed
