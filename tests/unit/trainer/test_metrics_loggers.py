"""Each logger of `run.loggers` gets every step, and one that fails costs nothing but itself."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from umbra.runtime.errors import ConfigError
from umbra.trainer.reporting import metrics_logger
from umbra.trainer.reporting.metrics_logger import (
    LOGGER_TARGETS,
    LoggedRun,
    MetricsLoggers,
    check_loggers,
    logger_names,
)

ROWS = [{"train/loss": 0.5, "rollout/reward_mean": 0.25}, {"train/loss": 0.25}]


def write_rows(name: str, folder: Path) -> list[str]:
    """Logs the rows as steps 1 and 2; returns the notes to the operator."""
    notes: list[str] = []
    run = LoggedRun(folder=folder, name="run-name", settings={"train": {"steps": 2}})
    with MetricsLoggers([name], run, notes.append) as loggers:
        for step, row in enumerate(ROWS, 1):
            loggers.write(step, row)
    return notes


def test_tensorboard_gets_every_value(tmp_path: Path) -> None:
    accumulator: Any = importlib.import_module(
        "tensorboard.backend.event_processing.event_accumulator"
    )

    assert write_rows("tensorboard", tmp_path) == []

    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("rollout/reward_mean")] == [(1, 0.25)]


def test_wandb_gets_every_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")

    assert write_rows("wandb", tmp_path) == []

    (record,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"train/loss" in record.read_bytes()


def test_mlflow_gets_every_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)

    assert write_rows("mlflow", tmp_path) == []

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("run-name").experiment_id
    (run,) = client.search_runs([experiment])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.25)]
    assert run.info.status == "FINISHED"


def test_a_logger_that_fails_is_named_and_no_longer_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("mlflow"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "no-such-scheme://server")

    (note,) = write_rows("mlflow", tmp_path)

    assert note.startswith("run.loggers: mlflow failed and is not used any more: ")


class LosesItsServer:
    """A `MetricsLogger` whose server is gone at step 2."""

    steps: ClassVar[list[int]] = []
    is_closed: ClassVar[bool] = False

    def __init__(self, run: LoggedRun) -> None:
        del run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        LosesItsServer.is_closed = True

    def write(self, step: int, row: Mapping[str, float]) -> None:
        if step > 1:
            raise ConnectionError("the server is gone")
        self.steps.append(step)


def test_a_logger_that_fails_between_steps_is_still_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"{__name__}:{LosesItsServer.__name__}"
    monkeypatch.setattr(metrics_logger, "LOGGER_TARGETS", {"lost": target})

    notes = write_rows("lost", tmp_path)

    assert notes == ["run.loggers: lost failed and is not used any more: the server is gone"]
    assert LosesItsServer.steps == [1]
    assert LosesItsServer.is_closed


def test_a_package_that_is_missing_is_named_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find_nothing(name: str) -> None:
        del name

    monkeypatch.setattr(importlib.util, "find_spec", find_nothing)

    check_loggers(None)
    assert logger_names(None) == []
    for name in LOGGER_TARGETS:
        with pytest.raises(ConfigError, match=f"pip install {name}"):
            check_loggers([name])
