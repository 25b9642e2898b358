"""Logs metrics to MLflow, configured by MLflow's own variables, such as MLFLOW_TRACKING_URI."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from umbra.trainer.reporting.eval_sample import EvalSample
from umbra.trainer.reporting.metrics_logger import LoggedRun, MetricsRow


class MlflowLogger:
    """A `MetricsLogger`; owns one MLflow run per start, in an experiment named after the run."""

    def __init__(self, run: LoggedRun) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._metric: Any = mlflow.entities.Metric
        self._client: Any = mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(run.name)
        experiment = found.experiment_id if found else self._client.create_experiment(run.name)
        self._run_id: str = self._client.create_run(experiment, run_name=run.name).info.run_id
        self._client.log_dict(self._run_id, dict(run.settings), "config.json")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if error is not None else "FINISHED")

    def write(self, step: int, row: MetricsRow) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(name, float(value), now_ms, step) for name, value in row.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def write_samples(self, step: int, samples: Sequence[EvalSample]) -> None:
        content = {"samples": [asdict(sample) for sample in samples]}
        self._client.log_dict(self._run_id, content, f"eval_samples/{step}.json")
