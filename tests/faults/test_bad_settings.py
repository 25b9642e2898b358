"""Errors before anything starts: every rank reports them at once, and no file is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_assets import write_rows
from whole_runs import BAD_INPUT_LIMIT_S, start_run

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_a_job_of_two_nodes_is_refused_by_every_rank_of_both(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    meeting = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"]
    meeting += ["--rdzv-endpoint", str(folder / "store"), "--rdzv-id", "two"]
    options = ["--nnodes", "2", *meeting]
    with (
        start_run(folder, num_ranks=1, torchrun=options) as one,
        start_run(other, num_ranks=1, torchrun=options) as two,
    ):
        ended = [run.wait(BAD_INPUT_LIMIT_S) for run in (one, two)]

    words = ["ConfigError: torchrun starts 2 ranks, 1 of them on this node", "--standalone"]
    rank_of_one = int(not ended[0].error_of(0))
    ended[0].check_failed(*words, ranks=[rank_of_one])
    ended[1].check_failed(*words, ranks=[1 - rank_of_one])
    assert not one.run_dir.exists()
    assert not two.run_dir.exists()


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
