"""Evaluations of standalone engines, beside training."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from test_lone_signals import REACH_LIMIT_S, check_stopped, held_run, stop_in
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


def test_engines_have_the_last_weights_before_a_run_waits_for_an_evaluation_beside_it(
    folder: Path,
) -> None:
    """An engine that comes up in that wait gets them under their own version."""
    settings = ("train.eval_beside=true", "train.eval_at_start=false", "train.eval_every=3")
    (folder / "held").mkdir()
    (folder / "held" / "evaluation").touch()
    with held_run(folder, "pool.mode=standalone", *settings, "train.steps=5") as (run, places):
        run.wait_for_step(5, 2 * REACH_LIMIT_S)
        versions = run.run_dir / "versions.jsonl"
        run.wait_for("sync", lambda: '"step": 5' in versions.read_text() or None, REACH_LIMIT_S)
        num_before = len(read_metrics(run.run_dir / "metrics.jsonl"))
        places.release("evaluation")
        ended = run.wait(END_LIMIT_S)

    assert ended.status == 0, ended.output
    rows = read_metrics(run.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 3, 5]
    assert num_before == 5


@pytest.mark.parametrize(
    ("settings", "step", "later"),
    [
        (["train.eval_beside=true", "train.eval_every=4"], 0, "evaluates by train.eval_at_start"),
        (["train.eval_at_start=false"], 2, "evaluates by train.eval_at_start"),
        (["train.eval_at_start=false", "train.steps=2"], 2, "repeats it"),
    ],
)
def test_a_stop_names_the_evaluation_that_it_cuts_off(
    folder: Path, settings: list[str], step: int, later: str
) -> None:
    (folder / "held").mkdir()
    (folder / "held" / "evaluation").touch()
    with held_run(folder, "pool.mode=standalone", *settings) as (run, at):
        if settings[0] == "train.eval_beside=true":
            run.wait_for_step(2, 2 * REACH_LIMIT_S)
        stop_in(run, at, "evaluation", signal.SIGTERM, rank=1)
        check_stopped(run, signal.SIGTERM)

        lost = f"the evaluation after step {step} was not finished, and is lost: a resume {later}"
        assert run.output.count(lost) == 1
