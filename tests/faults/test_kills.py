"""SIGKILL of each essential process: the run ends, reports why, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from whole_runs import start_run

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.alone]

END_LIMIT_S = 10.0
GONE_WITHIN_S = 5.0
LONG = "train.steps=100000"
ACTORS = ("rollouts", "worker-0", "policy-0")
ALL = ("torchrun", "rank 0", "rank 1", "guardian", "supervisor", *ACTORS)


@pytest.mark.parametrize(
    ("victim", "witnesses", "words"),
    [
        ("rank 0", [1], ["JobFailed: rank 0 failed", "killed (out of memory?) or crashed"]),
        (
            "guardian",
            [0, 1],
            ["JobFailed: the guardian failed", "without it nothing would clean up"],
        ),
        ("supervisor", [0, 1], ["the supervisor of this node ended", "logs/supervisor.log"]),
    ],
)
def test_a_killed_process_is_named_by_every_surviving_rank(
    folder: Path, victim: str, witnesses: list[int], words: list[str]
) -> None:
    with start_run(folder, LONG) as run:
        run.wait_for_step(1)
        pid = run.pid_of(victim)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        ended = run.wait()

    assert ended.status == 1
    ended.check_failed(*words, ranks=witnesses)
    assert ended.gone_at - killed < END_LIMIT_S


def test_everything_ends_with_torchruns_agent(folder: Path) -> None:
    with start_run(folder, LONG) as run:
        run.wait_for_step(1)
        pids = {name: run.pid_of(name) for name in ALL}
        there = {int(line.partition(":")[0]) for line in run.living()}
        assert there >= set(pids.values()), pids
        killed = time.monotonic()
        os.kill(pids["torchrun"], signal.SIGKILL)
        ended = run.wait(GONE_WITHIN_S)

    assert ended.status == -signal.SIGKILL
    assert ended.gone_at - killed < GONE_WITHIN_S
