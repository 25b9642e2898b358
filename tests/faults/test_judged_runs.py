"""A training run whose reward asks a judge, which shares the memory of the engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pool_log import assert_never_both_awake
from test_training_runs import read_summary, run, write_config
from training_models import save_model

from umbra.trainer.reporting.metrics_loggers import read_metrics

pytestmark = [pytest.mark.process, pytest.mark.slow]

JUDGE = """
[pools.judge]
model_path = "{folder}/judge"
tick_ms = 5.0
max_num_seqs = 16
"""


@pytest.fixture
def config(tmp_path: Path, fork_server: None) -> Path:
    save_model(tmp_path / "model", initializer_range=0.02)
    save_model(tmp_path / "judge", seed=7)
    for name, count in (("train", 64), ("eval", 16)):
        rows = [{"prompt": f"{name} {idx}=", "answer": "low"} for idx in range(count)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    path = write_config(tmp_path)
    path.write_text(path.read_text() + JUDGE.format(folder=tmp_path))
    return path


DEBUG = {"UMBRA_LOG_LEVEL": "DEBUG"}
JUDGED = "reward.function=digit_rewards:judged"


def steps_of(config: Path) -> list[dict[str, Any]]:
    rows = read_metrics(config.parent / "run/metrics.jsonl")
    return [dict(row) for row in rows if "train/loss" in row]


def supervisor_log(config: Path) -> Path:
    return config.parent / "run/logs/supervisor.log"


def num_turns(config: Path) -> int:
    return supervisor_log(config).read_text().count("pool judge has the memory after policy")


def test_a_hybrid_run_shares_its_memory_with_a_judge(config: Path) -> None:
    run(config, 2, JUDGED, environ=DEBUG)

    summary, steps = read_summary(config.parent), steps_of(config)
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert summary["reward_last"] > summary["reward_first"]
    assert summary["engine_restarts"] == 0
    # a batch and an evaluation can wait for more than one turn, but not each prompt for its own
    assert 5 <= num_turns(config) <= 16
    assert all(abs(row["train/ratio_mean"] - 1) < 1e-3 for row in steps)
    assert_never_both_awake(supervisor_log(config))
