"""SIGKILL of torchrun's agent while a job starts: no process of the job is left afterwards."""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from whole_runs import GONE_WITHIN_S, start_run

pytestmark = [pytest.mark.process, pytest.mark.slow]

# Seconds after the first rank was seen. Ranks bind themselves to the agent first, and then start
# guardian and supervisor. The small job's actor starts at once; the trainer loads a model first.
_OF_A_SMALL_JOB = (0.0, 0.05, 0.2, 0.8)


@pytest.mark.parametrize(
    ("program", "after_s"),
    [
        *(("small_job", after_s) for after_s in _OF_A_SMALL_JOB),
        ("umbra.trainer", 1.5),
    ],
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
