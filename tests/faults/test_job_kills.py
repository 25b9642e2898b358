"""SIGKILL of a whole job, and of its rollout manager: nothing is lost, nothing trained twice."""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from killed_jobs import KilledJob, plan_kills
from recorded_trainer import SAVE_PLACES
from trained_history import (
    History,
    check_ages,
    check_exactly_once,
    check_ledger,
    check_metrics,
    check_order,
    check_same,
)
from whole_runs import Run, write_config

pytestmark = [pytest.mark.process, pytest.mark.slow]

STEPS = 12
GROUP_SIZE = 4
SMALL = (
    "model.dtype=float64",  # an interrupted completion is then the uninterrupted one
    "pool.engine=embedded",
    "pool.engine_args={}",
    "reward.function=plain_rewards:distinct",
    f"rollout.group_size={GROUP_SIZE}",
    "rollout.max_new_tokens=20",
    f"train.steps={STEPS}",
    "train.learning_rate=1e-2",
    "train.checkpoint_every=2",
)
STANDALONE = ("pool.mode=standalone", "rollout.max_staleness=2", "pool.count=2")
NUM_MANAGER_KILLS = 3


@pytest.fixture
def rng() -> random.Random:
    seed = int(os.environ.get("UMBRA_KILL_SEED") or secrets.randbelow(2**31))
    print(f"UMBRA_KILL_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def job(folder: Path, rng: random.Random) -> Generator[KilledJob]:
    with KilledJob(folder, SMALL, rng=rng) as job:
        yield job


@pytest.fixture(scope="module")
def undisturbed(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> History:
    """The history of the same job without kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_config(folder, assets)
    with KilledJob(folder, SMALL, rng=random.Random(0)) as job:
        job.run_through([])
        history = job.history()
        check_all(history, job.run_dir)
    return history


def check_all(history: History, run_dir: Path, max_staleness: int = 0) -> None:
    assert sorted(history) == list(range(STEPS))
    check_exactly_once(history)
    check_order(history, run_dir, group_size=GROUP_SIZE)
    check_ledger(history, run_dir)
    check_metrics(history, run_dir)
    check_ages(history, run_dir, max_staleness)


def test_a_killed_job_trains_as_if_nothing_had_happened(
    job: KilledJob, rng: random.Random, undisturbed: History
) -> None:
    """The second time it resumes with another number of ranks."""
    for kill in plan_kills(2, STEPS, rng):
        with job.begin() as run:
            job.kill(run, kill)
    with job.begin(num_ranks=1) as run:
        job.finish(run)

    check_all(job.history(), job.run_dir)
    check_same(job.history(), undisturbed)


def test_a_job_that_is_killed_in_a_checkpoint_resumes_from_the_one_before_until_it_is_complete(
    job: KilledJob, undisturbed: History
) -> None:
    """The ranks have begun the step behind it, except while they copy tensors."""
    resumed: list[int] = []
    for place, saved_step in zip(SAVE_PLACES, (2, 2, 2, 2, 4), strict=True):
        last_batch = saved_step - 1 if place == "copied" else saved_step
        with job.begin() as run:
            job.kill_in_save(run, place, last_batch)
            resumed.append(job.resumed_from())
    with job.begin(num_ranks=1) as run:
        job.finish(run)
        resumed.append(job.resumed_from())

    assert resumed == [0, 0, 0, 0, 2, 4]
    check_all(job.history(), job.run_dir)
    check_same(job.history(), undisturbed)


@pytest.mark.parametrize("place", ["written", "all written"])
def test_a_stop_that_waits_for_a_checkpoint_in_vain_ends_without_it(
    folder: Path, rng: random.Random, place: str
) -> None:
    settings = (*SMALL, "train.shutdown_grace_s=0.5")
    with KilledJob(folder, settings, rng=rng) as job, job.begin() as run:
        ended = job.stop_in_save(run, place)

    assert ended.status != 0
    assert "did not end within 0.5 s of SIGTERM; steps 1 to " in ended.output, ended.output
    assert not list(job.run_dir.glob("checkpoints/*/COMPLETE"))


def test_a_killed_job_of_stale_data_loses_and_repeats_nothing(
    folder: Path, rng: random.Random
) -> None:
    with KilledJob(folder, (*SMALL, *STANDALONE), rng=rng) as job:
        job.run_through(plan_kills(1, STEPS, rng))

        assert job.num_kills == 1
        check_all(job.history(), job.run_dir, max_staleness=2)


def test_the_ranks_do_not_notice_that_the_manager_was_killed(
    folder: Path, rng: random.Random, undisturbed: History
) -> None:
    slowly = "reward.function=plain_rewards:distinct_after_a_while"
    with KilledJob(folder, (*SMALL, slowly), rng=rng) as job:
        kill_managers(job, rng)
        check_all(job.history(), job.run_dir)
        check_same(job.history(), undisturbed)


def kill_managers(job: KilledJob, rng: random.Random) -> None:
    # The run continues for a step or two until a kill arrives: none may come after its last batch.
    targets = sorted(rng.sample(range(1, STEPS - 4), NUM_MANAGER_KILLS))

    with job.begin() as run:
        for number, target in enumerate(targets, 1):
            job.wait_for_batch(run, target)
            ranks = [run.pid_of(f"rank {rank}") for rank in range(2)]
            kill_manager(run, number, rng.uniform(0.0, 1.5 * job.step_s()))
            assert [run.pid_of(f"rank {rank}") for rank in range(2)] == ranks
        ended = job.finish(run)

    assert "Error" not in ended.output, ended.output


def kill_manager(run: Run, incarnation: int, after_s: float) -> None:
    """Kills this incarnation `after_s` seconds after it serves, and waits for its successor."""

    def serves(wanted: int) -> bool | None:
        actor = run.actors()["rollouts"]
        return (actor["incarnation"] >= wanted and actor["state"] == "RUNNING") or None

    run.wait_for("the manager", lambda: serves(incarnation), 30.0)
    time.sleep(after_s)
    os.kill(run.pid_of("rollouts"), signal.SIGKILL)
    run.wait_for("its successor", lambda: serves(incarnation + 1), 30.0)
