"""Evaluations of standalone engines, beside training."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from test_lone_signals import REACH_LIMIT_S, check_stopped, held_run
from whole_runs import END_LIMIT_S

from umbra.trainer.reporting.metrics_loggers import read_metrics

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_training_continues_beside_an_evaluation_up_to_the_next_one(folder: Path) -> None:
    settings = (
        "pool.mode=standalone",
        "rollout.max_staleness=2",
        "train.eval_beside=true",
        "train.eval_at_start=false",
        "train.eval_every=3",
        "train.steps=8",
        "eval.sets.more=held_out.jsonl",
    )
    (folder / "held").mkdir()
    (folder / "held" / "evaluation").touch()
    with held_run(folder, *settings) as (run, places):
        run.wait_for_step(6, 2 * REACH_LIMIT_S)
        before = read_metrics(run.run_dir / "metrics.jsonl")
        places.release("evaluation")
        ended = run.wait(END_LIMIT_S)

    assert ended.status == 0, ended.output
    assert [row["step"] for row in before] == [1, 2, 3, 4, 5, 6]
    rows = read_metrics(run.run_dir / "metrics.jsonl")
    evaluated = [row for row in rows if "eval/accuracy" in row]
    assert [row["step"] for row in evaluated] == [3, 6, 8]
    assert rows.index(evaluated[0]) > 5
    for row in evaluated:  # of two prompts each
        of_sets = [row[f"eval/{name}/reward_mean"] for name in ("eval", "more")]
        assert row["eval/reward_mean"] == pytest.approx(sum(of_sets) / 2)
    shares = [row.get("eval/later_tokens_share") for row in evaluated]
    assert shares[2] is None  # the last one has the weights that are exported
    assert all(share is not None and 0 <= share <= 1 for share in shares[:2])


def test_a_stop_names_the_evaluation_that_it_does_not_wait_for(folder: Path) -> None:
    settings = ("pool.mode=standalone", "train.eval_beside=true", "train.eval_every=1000")
    (folder / "held").mkdir()
    (folder / "held" / "evaluation").touch()
    with held_run(folder, *settings) as (run, _):
        run.wait_for_step(2, 2 * REACH_LIMIT_S)
        os.kill(run.pid_of("rank 1"), signal.SIGTERM)
        check_stopped(run, signal.SIGTERM)

        assert "the evaluation after step 0 was not finished, and is lost" in run.output
