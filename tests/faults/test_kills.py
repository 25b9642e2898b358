"""SIGKILL of each essential process, also while a job starts: the run ends, reports why, and leaves
nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from whole_runs import GONE_WITHIN_S, start_run

pytestmark = [pytest.mark.process, pytest.mark.slow]

END_LIMIT_S = 10.0
GONE_WITH_THE_AGENT_S = 5.0
LONG = "train.steps=100000"
ACTORS = ("rollouts", "worker-0", "policy-0")
ALL = ("torchrun", "rank 0", "rank 1", "guardian", "supervisor", *ACTORS)


@pytest.mark.alone
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


@pytest.mark.alone
def test_everything_ends_with_torchruns_agent(folder: Path) -> None:
    with start_run(folder, LONG) as run:
        run.wait_for_step(1)
        pids = {name: run.pid_of(name) for name in ALL}
        there = {int(line.partition(":")[0]) for line in run.living()}
        assert there >= set(pids.values()), pids
        killed = time.monotonic()
        os.kill(pids["torchrun"], signal.SIGKILL)
        ended = run.wait(GONE_WITH_THE_AGENT_S)

    assert ended.status == -signal.SIGKILL
    assert ended.gone_at - killed < GONE_WITH_THE_AGENT_S


# Seconds after the first rank was seen. Ranks bind themselves to the agent first, and then start
# guardian and supervisor. The small job's actor starts at once; the trainer loads a model first.
_OF_A_SMALL_JOB = (0.0, 0.05, 0.2, 0.8)


@pytest.mark.parametrize(
    ("program", "after_s"),
    [*(("small_job", after_s) for after_s in _OF_A_SMALL_JOB), ("umbra.trainer", 1.5)],
)
def test_nothing_is_left_of_a_job_whose_agent_was_killed_as_it_started(
    folder: Path, program: str, after_s: float
) -> None:
    with start_run(folder, "train.steps=100000", program=program) as run:
        run.wait_for_a_rank()
        time.sleep(after_s)
        there = Counter(kind_of(line, program) for line in run.living())
        killed = time.monotonic()
        run.process.kill()
        ended = run.wait(GONE_WITHIN_S)

    assert ended.status == -signal.SIGKILL
    listing = ", ".join(f"{num} {kind}" for kind, num in sorted(there.items()))
    print(f"| {program} | {after_s:.2f} s | {listing} | {ended.gone_at - killed:.2f} s |")


def kind_of(line: str, program: str) -> str:
    """The kind of a process of the job, from its command line."""
    kinds = {
        "torch.distributed.run": "torchrun",
        "guardian.py": "guardian",
        "supervisor_main": "supervisor",
        f"-m {program}": "rank",
    }
    return next((kind for word, kind in kinds.items() if word in line), "other")
