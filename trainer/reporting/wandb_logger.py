"""Logs metrics to Weights & Biases, configured by its own variables, such as WANDB_PROJECT."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, Self

from umbra.trainer.reporting.eval_sample import EvalSample
from umbra.trainer.reporting.metrics_logger import LoggedRun, MetricsRow


class WandbLogger:
    """A `MetricsLogger`; owns one W&B run per start. Starts of one run share a W&B group."""

    def __init__(self, run: LoggedRun) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._run: Any = self._wandb.init(
            dir=str(run.folder), name=run.name, group=run.name, config=dict(run.settings)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._run.finish(exit_code=int(error is not None))

    def write(self, step: int, row: MetricsRow) -> None:
        self._run.log(dict(row), step=step)

    def write_samples(self, step: int, samples: Sequence[EvalSample]) -> None:
        columns = [field.name for field in fields(EvalSample)]
        rows = [[getattr(sample, name) for name in columns] for sample in samples]
        table = self._wandb.Table(columns=columns, data=rows)
        self._run.log({"eval/samples": table}, step=step)
