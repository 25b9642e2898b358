"""The ledger has the outcome of each prompt and its cause, whatever user code does to a run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import bad_days
import pytest
from run_assets import NUM_PROMPTS
from whole_runs import START_LIMIT_S, start_run

from umbra.runtime.rollout.ledger.ledger_index import LedgerIndex
from umbra.trainer.reporting.metrics_log import read_metrics

pytestmark = [pytest.mark.process, pytest.mark.slow]

GROUP_SIZE = 2
SETTINGS = (
    "rollout.agent=bad_days:run",
    "rollout.agent_timeout_s=2.0",
    "rollout.block_limit_s=0.5",
    "rollout.max_failed_share=0.5",
    "rollout.groups_per_step=8",
    f"rollout.group_size={GROUP_SIZE}",
    "reward.function=bad_days:reward",
    "data.shuffle=false",
    "train.steps=4",
)
DROPPED = {
    bad_days.HANGS: "agent loop failed: agent loop bad_days:run took longer than 2 s",
    bad_days.RAISES: "raised LookupError: the tool is gone",
    bad_days.REWARD_RAISES: "reward failed: reward function bad_days:reward raised ZeroDivision",
    bad_days.BLOCKS: "did not yield for 0.5 s, at ",
}


def test_bad_user_code_costs_its_own_prompts_and_the_ledger_says_why(folder: Path) -> None:
    with start_run(folder, *SETTINGS, num_ranks=0) as run:
        run.wait_for_step(1)
        os.kill(run.pid_of("worker-0"), signal.SIGKILL)
        ended = run.wait(START_LIMIT_S)

    assert ended.status == 0, ended.output
    with LedgerIndex.build(run.run_dir) as index:
        check_first_epoch(index)
        counts = index.counts()
    last = read_metrics(run.run_dir / "metrics.jsonl")[-1]
    num_dropped = last["rollout/dropped_agent_loop_failed"] + last["rollout/dropped_reward_failed"]
    assert counts["dropped"] == num_dropped * GROUP_SIZE
    assert counts["trained"] + counts["leased"] == 4 * 8 * GROUP_SIZE
    assert sum(counts.values()) == counts["dropped"] + 4 * 8 * GROUP_SIZE


def check_first_epoch(index: LedgerIndex) -> None:
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in index.rows("SELECT * FROM samples WHERE epoch = 0 ORDER BY place"):
        groups.setdefault(row["place"], []).append(row)
    assert len(groups) == NUM_PROMPTS
    for place, samples in groups.items():
        assert len(samples) == GROUP_SIZE
        cause = DROPPED.get(str(place))  # its answer is the prompt's number
        if cause is None:
            assert all(row["state"] in ("trained", "leased") for row in samples), samples
            continue
        for row in samples:
            found = index.sample(row["sample_id"])
            assert found is not None
            assert found["state"] == "dropped"
            assert cause in found["history"][-1]["detail"]
