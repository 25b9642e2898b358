"""Each logger of `run.loggers` gets every step, and one that fails costs nothing but itself."""

from __future__ import annotations

import importlib
import importlib.util
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import pytest

from umbra.runtime.errors import ConfigError
from umbra.trainer.reporting import metrics_loggers
from umbra.trainer.reporting.metrics_loggers import (
    LOGGER_TARGETS,
    EvalSample,
    LoggedRun,
    MetricsLoggers,
    check_loggers,
    logger_names,
)

ROWS = [{"train/loss": 0.5, "rollout/reward_mean": 0.25}, {"train/loss": 0.25}]
SAMPLES = [
    EvalSample(
        prompt_id="7",
        prompt="2+2=",
        completion="# *four*\n<b>|4|</b>",
        reward=0.5,
        num_tokens=9,
        finish_reason="stop",
    )
]


def write_rows(name: str, folder: Path, first_step: int = 1) -> list[str]:
    """Logs the rows as two steps, then samples; returns the notes to the operator."""
    notes: list[str] = []
    run = LoggedRun(
        folder=folder, name="run-name", settings={"train": {"steps": 2}}, first_step=first_step
    )
    with MetricsLoggers([name], run, notes.append) as loggers:
        for step, row in enumerate(ROWS, first_step):
            loggers.write(step, row)
        loggers.write_samples(2, SAMPLES)
    return notes


def test_tensorboard_gets_every_value(tmp_path: Path) -> None:
    accumulator: Any = importlib.import_module(
        "tensorboard.backend.event_processing.event_accumulator"
    )

    assert write_rows("tensorboard", tmp_path) == []

    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("rollout/reward_mean")] == [(1, 0.25)]


def test_tensorboard_hides_the_steps_that_a_resume_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator: Any = importlib.import_module(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    for first_step, time_s in ((1, 1e9), (2, 2e9)):  # names of files have their time
        monkeypatch.setattr(time, "time", lambda time_s=time_s: time_s)
        assert write_rows("tensorboard", tmp_path, first_step) == []

    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()

    steps = [(e.step, e.wall_time) for e in events.Scalars("train/loss")]
    assert steps == [(1, 1e9), (2, 2e9), (3, 2e9)]


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated:DeprecationWarning")
def test_tensorboard_shows_samples_as_a_table_that_leaves_their_text_alone(tmp_path: Path) -> None:
    plugin: Any = importlib.import_module("tensorboard.plugins.text.text_plugin")
    multiplexer: Any = importlib.import_module(
        "tensorboard.backend.event_processing.plugin_event_multiplexer"
    )
    provider: Any = importlib.import_module("tensorboard.backend.event_processing.data_provider")
    base: Any = importlib.import_module("tensorboard.plugins.base_plugin")
    context: Any = importlib.import_module("tensorboard.context")
    write_rows("tensorboard", tmp_path)
    read = multiplexer.EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    data_provider = provider.MultiplexerDataProvider(read, str(tmp_path))

    shown = plugin.TextPlugin(base.TBContext(data_provider=data_provider)).text_impl(
        context.RequestContext(), "tensorboard", "eval/samples", "", True
    )

    assert [point["step"] for point in shown] == [2]
    assert "<code># *four*\n&lt;b&gt;|4|&lt;/b&gt;" in shown[0]["text"]
    assert "<code>2+2=" in shown[0]["text"]
    assert "finish_reason" in shown[0]["text"]


def test_wandb_gets_every_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")

    assert write_rows("wandb", tmp_path) == []

    (record,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"train/loss" in record.read_bytes()
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/eval/samples_*.json")
    logged = json.loads(table.read_text())
    assert logged["columns"][:3] == ["prompt_id", "prompt", "completion"]
    assert logged["data"] == [["7", "2+2=", SAMPLES[0].completion, 0.5, 9, "stop"]]


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
    path = client.download_artifacts(run.info.run_id, "eval_samples/2.json")
    assert json.loads(Path(path).read_text()) == {"samples": [asdict(SAMPLES[0])]}


def test_a_logger_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("mlflow"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "no-such-scheme://server")

    (note,) = write_rows("mlflow", tmp_path)

    assert note.startswith("run.loggers: mlflow failed and is tried again later: ")


class LosesItsServer:
    """A `MetricsLogger` whose server is gone at step 2."""

    steps: ClassVar[list[int]] = []
    is_closed: ClassVar[bool] = False

    def __init__(self, run: LoggedRun) -> None:
        del run

    def close(self, *, failed: bool) -> None:
        LosesItsServer.is_closed = True

    def write(self, step: int, row: Mapping[str, float]) -> None:
        if step > 1:
            raise ConnectionError("the server is gone")
        self.steps.append(step)

    def write_samples(self, step: int, samples: Sequence[EvalSample]) -> None:
        raise AssertionError("it failed before")


def test_a_logger_that_fails_between_steps_is_still_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"{__name__}:{LosesItsServer.__name__}"
    monkeypatch.setattr(metrics_loggers, "LOGGER_TARGETS", {"lost": target})

    notes = write_rows("lost", tmp_path)

    assert notes == ["run.loggers: lost failed and is tried again later: the server is gone"]
    assert LosesItsServer.steps == [1]
    assert LosesItsServer.is_closed


class Flaky:
    """A `MetricsLogger` whose server may be gone, for which it looks 100 s."""

    now = 0.0
    is_gone = False
    steps: ClassVar[list[int]] = []

    def __init__(self, run: LoggedRun) -> None:
        del run

    def close(self, *, failed: bool) -> None:
        del failed

    def write(self, step: int, row: Mapping[str, float]) -> None:
        del row
        if Flaky.is_gone:
            Flaky.now += 100.0
            raise ConnectionError("the server is gone")
        self.steps.append(step)

    def write_samples(self, step: int, samples: Sequence[EvalSample]) -> None:
        raise AssertionError("no samples")


def test_a_logger_whose_server_comes_back_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_loggers, "LOGGER_TARGETS", {"lost": f"{__name__}:Flaky"})
    notes: list[str] = []
    run = LoggedRun(folder=tmp_path, name="run", settings={}, first_step=1)

    with MetricsLoggers(["lost"], run, notes.append, clock=lambda: Flaky.now) as loggers:
        loggers.write(1, {})
        Flaky.is_gone = True
        loggers.write(2, {})
        Flaky.is_gone = False
        Flaky.now += 1999.0
        loggers.write(3, {})
        Flaky.now += 1.0
        loggers.write(4, {})
        loggers.write(5, {})

    assert Flaky.steps == [1, 4, 5]
    assert notes == [
        "run.loggers: lost failed and is tried again later: the server is gone",
        "run.loggers: lost works again; metrics.jsonl has what it missed",
    ]


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
