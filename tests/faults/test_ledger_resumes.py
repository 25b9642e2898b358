"""Going on where ledger, checkpoint and settings do not fit, and starting over an old ledger."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from whole_runs import Ended, start_run

from umbra.runtime.rollout.ledger.index import LedgerIndex

pytestmark = [pytest.mark.process, pytest.mark.slow]

GROUPS_PER_STEP, GROUP_SIZE = 4, 2  # of `whole_runs.write_config`
EVERY_STEP = "train.checkpoint_every=1"


def run_to_end(folder: Path, *settings: str) -> Ended:
    with start_run(folder, EVERY_STEP, *settings, num_ranks=0) as run:
        return run.wait()


def kill_in_the_middle(folder: Path, *settings: str) -> None:
    """A run whose last batch no checkpoint covers."""
    with start_run(folder, "train.steps=100000", *settings, num_ranks=0) as run:
        run.wait_for_step(3)
        run.kill_all(random.Random(0))


def test_a_checkpoint_without_its_ledger_is_an_error_that_names_both_places(folder: Path) -> None:
    assert run_to_end(folder).status == 0
    shutil.rmtree(folder / "run" / "ledger")

    for _ in range(2):  # the first attempt makes a ledger, which does not help the second
        ended = run_to_end(folder, "run.resume=auto", "train.steps=4")

        ended.check_failed(
            f"LedgerError: the ledger in {folder / 'run/ledger/rollouts'} ends at ",
            "checkpoint was made at 1-0-",
            "put the ledger's files back",
        )


def test_another_group_size_than_that_of_open_groups_is_an_error(folder: Path) -> None:
    kill_in_the_middle(folder)

    ended = run_to_end(folder, "run.resume=auto", "rollout.group_size=3")

    ended.check_failed(
        "LedgerError: place ",
        "with 3 samples, and the ledger has ",
        f"with {GROUP_SIZE} there",
        "rollout.group_size was changed; change it back",
    )


def test_a_killed_job_without_a_checkpoint_goes_on_with_what_was_generated(folder: Path) -> None:
    kill_in_the_middle(folder)

    ended = run_to_end(folder, "run.resume=auto")

    assert ended.status == 0, ended.output
    assert "the rollout manager goes on with" in ended.output
    with LedgerIndex.build(folder / "run") as index:
        rows = index.rows("SELECT step, count(*) AS n FROM samples WHERE step < 2 GROUP BY step")
        counts = {row["step"]: row["n"] for row in rows}
    assert counts == dict.fromkeys(range(2), GROUPS_PER_STEP * GROUP_SIZE)


def test_a_fresh_run_over_an_old_one_has_a_ledger_of_its_own(folder: Path) -> None:
    assert run_to_end(folder).status == 0

    ended = run_to_end(folder, "run.overwrite=true", "train.steps=1")

    assert ended.status == 0, ended.output
    with LedgerIndex.build(folder / "run") as index:
        counts = index.counts()
        lives = index.rows("SELECT life FROM lives")
    assert lives == [{"life": 1}]
    assert counts["trained"] == sum(counts.values()) == GROUPS_PER_STEP * GROUP_SIZE


def test_a_checkpoint_of_a_history_that_was_given_up_is_not_gone_on_from(folder: Path) -> None:
    assert run_to_end(folder, "train.steps=4", "train.keep_checkpoints=4").status == 0
    older = "run.resume=run/checkpoints/step-000002"
    assert run_to_end(folder, older, "train.steps=3", "train.keep_checkpoints=4").status == 0

    ended = run_to_end(folder, "run.resume=auto", "train.steps=6")

    ended.check_failed(
        "LedgerError: the checkpoint after 4 steps was made at 1-0-",
        "the job went back to step 2 after that",
        "remove the checkpoint",
    )
