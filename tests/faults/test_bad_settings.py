"""Errors before anything starts: every rank reports them at once, and no file is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_assets import write_rows
from whole_runs import BAD_INPUT_LIMIT_S, start_run

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_more_ranks_than_completions_is_an_error_of_every_rank(folder: Path) -> None:
    settings = ["rollout.groups_per_step=1", "rollout.group_size=2"]
    with start_run(folder, *settings, num_ranks=3) as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    assert ended.status == 1
    ended.check_failed("is 2 completions a step for 3 ranks", "start 2 ranks or fewer")
    assert not run.run_dir.exists()


def test_more_ranks_than_prompts_is_an_error_of_every_rank(folder: Path) -> None:
    write_rows(folder / "one.jsonl", [{"prompt": "all 1=", "answer": "1"}])

    with start_run(folder, "data.train=one.jsonl") as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    ended.check_failed("has 1 prompts for 2 ranks", "use 1 ranks or fewer")


def test_a_job_without_engines_that_none_can_join_is_an_error_of_every_rank(folder: Path) -> None:
    with start_run(folder, "pool.count=0") as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    ended.check_failed("pool.count = 0", "set UMBRA_HOST_ADDRESS")
