"""docs/metrics.md explains every metric, and no others.

Whole runs (`tests/faults/test_training_runs.py`) check the metrics that they log; this file checks
those that runs on a CPU may lack.
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import get_args

import pytest
import torch
from documented_names import check_metrics, documented

from umbra.runtime.cluster.memory_plan import Phase
from umbra.trainer.algorithms.base import LossInputs, load_loss
from umbra.trainer.config.algorithm_names import LOSSES
from umbra.trainer.config.trainer_config import TrainSection
from umbra.trainer.reporting.memory_metrics import GpuMemorySeen

ROOT = Path(__file__).resolve().parents[3]
LITERAL = re.compile(r'"((?:time|sync|eval|memory|rollout|sft|train|critic)/[a-z0-9_]+)"')


def source_of(*folders: str) -> str:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return "\n".join(path.read_text() for path in paths)


def test_metrics_that_the_trainer_names_are_explained() -> None:
    names = set(LITERAL.findall(source_of("trainer"))) - {"eval/samples"}  # a table

    assert "time/offload_s" in names
    check_metrics([names])


@pytest.mark.parametrize("loss", LOSSES)
def test_metrics_of_losses_are_explained(loss: str) -> None:
    tokens = torch.zeros(2)
    inputs = LossInputs(
        rollout_logprobs=tokens,
        proximal_logprobs=tokens,
        advantages=tokens,
        weights=tokens,
        sample_lens=torch.tensor([2]),
    )

    output = load_loss(loss)(tokens, inputs, TrainSection(steps=1))

    check_metrics([[f"train/{name}" for name in output.metrics]])


def test_metrics_of_gpus_are_explained() -> None:
    seen = GpuMemorySeen(None, [])
    seen.seen_nbytes = {phase: {(0, 0): 1} for phase in get_args(Phase)}
    kinds = re.findall(r'f"\{name\}_(\w+)"', source_of("trainer/reporting"))

    assert "reserved" in kinds
    check_metrics([seen.metrics(), [f"memory/train_{kind}_gib" for kind in kinds]])


def test_the_example_reads_the_metrics_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows: list[dict[str, float]] = [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "train/loss": 0.0, "rollout/reward_mean": 0.5},
    ]
    path = tmp_path / "runs/quickstart/metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/metrics.md").read_text(), re.S)
    (tmp_path / "example.py").write_text(example)

    shown = runpy.run_path("example.py")

    assert (shown["rewards"], shown["accuracy"]) == ({1: 0.5}, {0: 0.25})


def test_explained_metrics_exist() -> None:
    source = source_of("trainer", "runtime/rollout")
    names = [name for name in documented("metrics.md") if "/" in name and " " not in name]

    assert len(names) > 50
    parts = {part for name in names for part in re.split("[A-Z]+", name.split("/")[1])}
    assert [part for part in sorted(parts) if part.removesuffix("_gib") not in source] == []
