"""The ledger has the outcome of each prompt and its cause, whatever user code does to a run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import bad_days
import pytest
from run_assets import NUM_PROMPTS
from whole_runs import START_LIMIT_S, start_run

from umbra.runtime.cli.ledger_command import open_index
from umbra.runtime.rollout.ledger.ledger_index import LedgerIndex
from umbra.runtime.rollout.ledger.sample_accounts import SampleState
from umbra.runtime.rollout.ledger.sample_table import SampleRow
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
    index = open_index(run.run_dir)
    check_first_epoch(index)
    counts = index.table.counts
    last = read_metrics(run.run_dir / "metrics.jsonl")[-1]
    num_dropped = last["rollout/dropped_agent_loop_failed"] + last["rollout/dropped_reward_failed"]
    assert counts[SampleState.DROPPED] == num_dropped * GROUP_SIZE
    assert counts[SampleState.TRAINED] + counts[SampleState.LEASED] == 4 * 8 * GROUP_SIZE
    assert sum(counts.values()) == counts[SampleState.DROPPED] + 4 * 8 * GROUP_SIZE


def check_first_epoch(index: LedgerIndex) -> None:
    groups: dict[int, list[SampleRow]] = {}
    for row in index.newest(None)[0]:
        if row.group.epoch == 0:
            groups.setdefault(row.group.order_idx, []).append(row)
    assert len(groups) == NUM_PROMPTS
    for place, samples in groups.items():
        assert len(samples) == GROUP_SIZE
        cause = DROPPED.get(str(place))  # its answer is the prompt's number
        if cause is None:
            assert all(str(row.state) in ("trained", "leased") for row in samples), samples
            continue
        for row in samples:
            assert row.state is SampleState.DROPPED
            assert cause in index.story(row)[-1]["detail"]
