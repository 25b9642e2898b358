"""The files by which a job is found and asked to stop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from umbra.runtime.cluster.run_requests import JobAnswer, JobRequest, RunNotice, SupervisorAddress
from umbra.runtime.errors import ConfigError

ADDRESS = SupervisorAddress(job="a", node_id="node", pid=1, socket_dir="/tmp/none")
REQUEST = JobRequest(job="a", kind="preempt", grace_s=3.0)


def test_a_request_is_taken_once(tmp_path: Path) -> None:
    notice = RunNotice(tmp_path)
    notice.leave_request(REQUEST)

    assert [notice.take_request() for _ in range(2)] == [REQUEST, None]


def test_an_answer_is_for_one_request(tmp_path: Path) -> None:
    notice = RunNotice(tmp_path)
    another = JobRequest(job="a", kind="preempt", grace_s=3.0)
    answer = JobAnswer(token=REQUEST.token, refusal="no such node")
    assert notice.take_answer(REQUEST) is None

    notice.answer(answer)

    assert notice.take_answer(another) is None
    assert [notice.take_answer(REQUEST) for _ in range(2)] == [answer, None]


def test_a_file_of_another_version_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "supervisor.json"
    path.write_text('{"job": "a", "node_id": "n", "pid": 1, "socket_dir": "/s", "later": 1}')

    with pytest.raises(ConfigError, match=f"cannot read {path}, which another version of umbra"):
        RunNotice(tmp_path).address()


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"job": "a"}', '{"job": "a", "kind": "pause", "grace_s": 1.0}', "\xff"]
)
def test_a_request_that_makes_no_sense_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "request.json").write_bytes(text.encode("latin-1"))
    notice = RunNotice(tmp_path)

    assert notice.take_request() is None
    assert not (tmp_path / "request.json").exists()


def test_a_new_job_removes_what_concerns_the_last_one(tmp_path: Path) -> None:
    notice = RunNotice(tmp_path)
    notice.leave_request(REQUEST)
    notice.mark_preempted()
    address = replace(ADDRESS, job="b")

    notice.post(address)
    assert notice.address() == address
    assert notice.take_request() is None
    assert not notice.is_preempted

    notice.withdraw(address)
    assert notice.address() is None


def test_a_request_outlives_a_restart_of_the_ranks_and_a_change_of_the_lead(tmp_path: Path) -> None:
    notice = RunNotice(tmp_path)
    elsewhere = replace(ADDRESS, node_id="another-node")
    notice.post(ADDRESS)
    notice.leave_request(REQUEST)

    notice.post(elsewhere)
    notice.withdraw(ADDRESS)

    assert notice.address() == elsewhere
    assert notice.take_request() == REQUEST
