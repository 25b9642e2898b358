"""Errors before anything starts: every rank reports them at once, and no file is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_runs import BAD_INPUT_LIMIT_S, start_run

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.patient]


@pytest.mark.parametrize(
    ("num_ranks", "setting", "words"),
    [
        (
            2,
            "model.dtype=float23",
            ["model.dtype", "'float32', 'bfloat16' or 'float64'", "float23"],
        ),
        (0, "model.dytpe=float32", ["model.dytpe is unknown", "did you mean 'dtype'", "allowed:"]),
        (0, "train.steps=many", ["train.steps", "valid integer", "'many'"]),
        (0, "rollout.group_size=0", ["rollout.group_size", "greater than or equal to 1"]),
        (0, "reward.function=rewards.py", ["reward.function", "'module:function'", "rewards.py"]),
        (0, "rollout.max_new_tokens=9999", ["leaves no room", "raise pool.max_context_len"]),
        (0, "data.id_column=key", ["line 1: no column 'key'", "set data.id_column"]),
        (0, "rollout.learning_rate=1", ["did you mean 'train.learning_rate'?"]),
        (0, "data.train=nothing.jsonl", ["data.train: no file", "nothing.jsonl", "current folder"]),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(
    folder: Path, num_ranks: int, setting: str, words: list[str]
) -> None:
    with start_run(folder, setting, num_ranks=num_ranks) as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    assert ended.status == 1
    ended.check_failed(*words)
    assert not run.run_dir.exists()


def test_every_rank_reports_that_the_model_directory_is_missing(folder: Path) -> None:
    with start_run(folder, "model.path=/nowhere/model") as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    ended.check_failed(
        "DataError: model.path: no directory /nowhere/model",
        "give a Hugging Face model directory",
    )
    assert not run.run_dir.exists()


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

    ended.check_failed("is 2 completions a step for 3 ranks", "start 2 ranks or fewer")
