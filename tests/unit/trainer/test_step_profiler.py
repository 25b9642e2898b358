from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from umbra.trainer.config.trainer_config import RunSection
from umbra.trainer.reporting.step_profiler import StepProfiler, busy_share


def test_chosen_steps_alone_leave_a_profile_of_their_operators(tmp_path: Path) -> None:
    profiler = StepProfiler(RunSection(dir=tmp_path, profile_steps=(2,)), rank=1)

    for step in (1, 2, 3):
        with profiler.step(step) as metrics:
            torch.mm(torch.ones(3, 3), torch.ones(3, 3))
        assert not metrics  # nothing of a GPU

    (path,) = (tmp_path / "trace").iterdir()
    assert path.name == "torch.1.step-2.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any(event["name"] == "aten::mm" for event in events)


def test_a_step_is_trained_although_its_profile_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trace").write_text("a file where the folder should be")
    profiler = StepProfiler(RunSection(dir=tmp_path, profile_steps=(1,)), rank=0)

    with profiler.step(1):
        pass

    assert "no profile of step 1" in caplog.text


def test_work_on_several_streams_counts_once() -> None:
    assert busy_share([(10.0, 14.0), (0.0, 4.0), (1.0, 2.0), (3.0, 5.0)]) == 9 / 14
    assert busy_share([(5.0, 5.0)]) == 1.0
