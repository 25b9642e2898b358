"""Engines that cannot be started, crash in a loop or take too much memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from whole_runs import BAD_INPUT_LIMIT_S, start_run

from umbra.trainer.reporting.metrics_loggers import read_metrics

pytestmark = [pytest.mark.process, pytest.mark.slow]

EMBEDDED = ("pool.engine=embedded", "pool.engine_args={}")


def test_an_argument_that_the_engine_does_not_take_is_named(folder: Path) -> None:
    with start_run(folder, "pool.engine_args={speed=1}", num_ranks=0) as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    assert ended.status == 1
    ended.check_failed(
        "policy-0#1 failed to start",
        "pool.engine_args.speed: ",
        "unexpected keyword argument 'speed'; it takes vocab",
    )


def test_every_rank_reports_why_an_engine_cannot_start(folder: Path) -> None:
    with start_run(folder, "pool.engine=failing_engines:DiesAtStart") as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    assert ended.status == 1
    ended.check_failed(
        "policy-0#1 failed to start", "exited with status 5", "CUDA driver version is insufficient"
    )


def test_an_engine_that_dies_in_every_sync_fails_the_run_on_every_rank(folder: Path) -> None:
    engine = "pool.engine=failing_engines:DiesInSync"

    with start_run(folder, engine, "pool.max_restarts=1") as run:
        ended = run.wait()

    ended.check_failed(
        "policy-0 failed: policy-0#2",
        "exited with status 6",
        "after 1 restarts within 600 s (allowed: 1)",
    )
    # The engine's end is reported as such, not as an error of the sync.
    note = r"policy-0#1 \(pid \d+\) exited with status 6; restarting it in [\d.]+ s$"
    assert re.search(note, ended.output, re.MULTILINE), ended.output


def test_an_engine_that_dies_of_every_request_fails_the_run(folder: Path) -> None:
    engine = "pool.engine=failing_engines:DiesAtWork"

    with start_run(folder, engine, "pool.max_restarts=1", num_ranks=0) as run:
        ended = run.wait()

    ended.check_failed("policy-0#2", "exited with status 7", "after 1 restarts")
    assert "8 trajectories keep their 0 tokens" in ended.output


def test_an_engine_above_its_memory_limit_is_named_with_the_limit(folder: Path) -> None:
    limit = ("pool.memory_limit_mib=64", "pool.max_restarts=0")

    with start_run(folder, *EMBEDDED, *limit, num_ranks=0) as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    ended.check_failed("MiB resident, above its memory limit of 64 MiB: raise")


def test_an_engine_with_another_model_ends_the_run_before_a_step(folder: Path) -> None:
    """The engine of this run has no model: its logprobs are made up."""
    rewards = "reward.function=plain_rewards:distinct"

    with start_run(folder, rewards, "train.max_logprob_difference=0.01") as run:
        ended = run.wait()

    ended.check_failed(
        "UmbraError: step 1: engines and trainer do not compute the same model",
        " by the engine and ",
        "No weight has changed. Usual causes",
    )
    assert read_metrics(run.run_dir / "metrics.jsonl") == []
    assert not (run.run_dir / "checkpoints").exists()
