"""Resuming when ledger, checkpoint and settings do not match, and starting over an old ledger."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest
from whole_runs import Ended, start_run, write_config

from umbra.runtime.dash.sample_texts import open_ledger
from umbra.runtime.rollout.ledger.sample_accounts import SampleState
from umbra.trainer.reporting.metrics_loggers import read_metrics

pytestmark = [pytest.mark.process, pytest.mark.slow]

GROUPS_PER_STEP, GROUP_SIZE = 4, 2  # of `whole_runs.write_config`
EVERY_STEP = "train.checkpoint_every=1"


@pytest.fixture(scope="module")
def ended(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a job that has finished. Tests work on copies."""
    folder = tmp_path_factory.mktemp("ended")
    write_config(folder, assets)
    assert run_to_end(folder).status == 0
    return folder / "run"


@pytest.fixture(scope="module")
def killed(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a job without a checkpoint. Tests work on copies."""
    folder = tmp_path_factory.mktemp("killed")
    write_config(folder, assets)
    with start_run(folder, "train.steps=100000", num_ranks=0) as run:
        run.wait_for_step(3)
        run.kill_all(random.Random(0))
    return folder / "run"


def run_to_end(folder: Path, *settings: str) -> Ended:
    with start_run(folder, EVERY_STEP, *settings, num_ranks=0) as run:
        return run.wait()


def test_a_checkpoint_without_its_ledger_is_an_error_that_names_both_positions(
    folder: Path, ended: Path
) -> None:
    shutil.copytree(ended, folder / "run")
    shutil.rmtree(folder / "run" / "ledger")

    for _ in range(2):  # the first attempt creates a ledger, which must not help the second
        resumed = run_to_end(folder, "run.resume=auto", "train.steps=4")

        resumed.check_failed(
            f"LedgerError: the ledger in {folder / 'run/ledger/rollouts'} ends at ",
            "checkpoint was made at 1-0-",
            "put the ledger's files back",
        )


def test_another_group_size_than_that_of_open_groups_is_an_error(
    folder: Path, killed: Path
) -> None:
    shutil.copytree(killed, folder / "run")

    resumed = run_to_end(folder, "run.resume=auto", "rollout.group_size=3")

    resumed.check_failed(
        "LedgerError: index ",
        "with 3 samples, but the ledger has ",
        f"with {GROUP_SIZE} there",
        "rollout.group_size was changed; change it back",
    )


def test_a_resume_with_other_data_is_refused_and_the_next_with_the_right_data_is_not(
    folder: Path, assets: Path, killed: Path
) -> None:
    shutil.copytree(killed, folder / "run")
    rows = (assets / "train.jsonl").read_text().splitlines()
    (folder / "reversed.jsonl").write_text("".join(f"{row}\n" for row in reversed(rows)))
    tokenizer = folder / "run/tokenizers/policy.json"
    before = tokenizer.stat().st_mtime_ns

    refused = run_to_end(folder, "run.resume=auto", "data.train=reversed.jsonl")

    refused.check_failed(
        "DataError: data.train: reversed.jsonl, prompt 1: it is ",
        " and was ",
        "belong to the data that it began with",
        "begin a new run (run.resume = 'never' and run.overwrite = true, or another run.dir)",
    )
    assert tokenizer.stat().st_mtime_ns == before, "that of the samples"

    resumed = run_to_end(folder, "run.resume=auto")

    assert resumed.status == 0, resumed.output
    assert "the rollout manager resumes with" in resumed.output
    index = open_ledger(folder / "run")
    assert [len(index.of_step(step)) for step in (0, 1)] == [GROUPS_PER_STEP * GROUP_SIZE] * 2


def test_a_new_run_from_a_checkpoint_of_another_begins_its_data(
    folder: Path, assets: Path, ended: Path
) -> None:
    rows = (assets / "train.jsonl").read_text().splitlines()
    (folder / "few.jsonl").write_text("".join(f"{row}\n" for row in rows[: 3 * GROUPS_PER_STEP]))
    others = ("data.train=few.jsonl", "data.shuffle=false", "train.steps=3")

    begun = run_to_end(folder, f"run.resume={ended}/checkpoints/step-000002", *others)

    assert begun.status == 0, begun.output
    rows, _ = open_ledger(folder / "run").newest(None, SampleState.TRAINED)
    assert {row.group.group_id for row in rows} == {f"e0/{idx}" for idx in range(GROUPS_PER_STEP)}


def test_a_fresh_run_over_an_old_one_has_a_ledger_of_its_own(folder: Path, ended: Path) -> None:
    """The old ledger is kept until the new run has done a step."""
    shutil.copytree(ended, folder / "run")

    failed = run_to_end(folder, "run.overwrite=true", "pool.engine_args.bogus=1")

    assert failed.status == 1
    counts = open_ledger(folder / "run" / "replaced").table.counts
    assert counts[SampleState.TRAINED] > GROUPS_PER_STEP * GROUP_SIZE

    fresh = run_to_end(folder, "run.overwrite=true", "train.steps=1")

    assert fresh.status == 0, fresh.output
    assert "the earlier run is kept in" in fresh.output
    assert not (folder / "run" / "replaced").exists()
    index = open_ledger(folder / "run")
    counts = index.table.counts
    assert [life.life for life in index.lives()] == [1]
    assert counts[SampleState.TRAINED] == counts.total() == GROUPS_PER_STEP * GROUP_SIZE


def test_a_run_with_no_step_left_is_reported(folder: Path, ended: Path) -> None:
    shutil.copytree(ended, folder / "run")

    again = run_to_end(folder, "run.resume=auto", "train.steps=1")

    assert again.status == 0, again.output
    assert "train.steps is 1: no step is left to do" in again.output


def test_a_checkpoint_of_a_discarded_history_is_not_resumed_from(folder: Path) -> None:
    assert run_to_end(folder, "train.steps=4", "train.keep_checkpoints=4").status == 0
    older = "run.resume=run/checkpoints/step-000002"
    assert run_to_end(folder, older, "train.steps=3", "train.keep_checkpoints=4").status == 0

    resumed = run_to_end(folder, "run.resume=auto", "train.steps=6")

    resumed.check_failed(
        "LedgerError: the checkpoint after 4 steps was made at 1-0-",
        "the job later went back to step 2",
        "remove the checkpoint",
    )


def test_the_samples_of_a_skipped_step_are_trained_once(folder: Path) -> None:
    settings = ("train.loss=odd_losses:nan_in_step_2", "train.skip_nonfinite=1")

    ended = run_to_end(folder, *settings, "train.steps=3")
    resumed = run_to_end(folder, *settings, "train.steps=4", "run.resume=auto")

    assert ended.status == resumed.status == 0, ended.output + resumed.output
    assert ended.output.count("warning: step 2: the gradient is not finite (norm nan): sample") == 1
    assert "warning: step" not in resumed.output
    metrics = read_metrics(folder / "run/metrics.jsonl")
    rows = [row for row in metrics if "train/skipped_steps" in row]
    assert [row["train/skipped_steps"] for row in rows] == [0, 1, 0, 0]
    index = open_ledger(folder / "run")
    trained = [index.of_step(step) for step in range(4)]
    assert [len(of_step) for of_step in trained] == [GROUPS_PER_STEP * GROUP_SIZE] * 4
    assert {row.state for of_step in trained for row in of_step} == {SampleState.TRAINED}
    groups = {row.group.group_id for of_step in trained for row in of_step}
    assert len(groups) == 4 * GROUPS_PER_STEP


def test_torchrun_restores_the_last_checkpoint_after_gradients_that_are_not_finite(
    folder: Path,
) -> None:
    """Ranks that start do one step, skip one, and fail in the next."""
    settings = ("train.loss=odd_losses:nan_from_step_2", "train.skip_nonfinite=1", "train.steps=9")
    once_more = ("--standalone", "--max-restarts=1")

    with start_run(folder, *settings, EVERY_STEP, num_ranks=1, torchrun=once_more) as run:
        ended = run.wait()

    assert ended.status != 0
    assert ended.output.count("resuming after step ") == 1, ended.output
    failures = re.findall(r"^rank 0: UmbraError: step .* 1 before it were", ended.output, re.M)
    assert len(failures) == 2, ended.output
