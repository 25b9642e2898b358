"""Logs metrics to Weights & Biases, configured by its own variables, such as WANDB_PROJECT."""

from __future__ import annotations

import importlib
from types import TracebackType
from typing import Any, Self

from umbra.trainer.reporting.metrics_logger import LoggedRun, MetricsRow


class WandbLogger:
    """A `MetricsLogger`; owns one W&B run per start. Starts of one run share a W&B group."""

    def __init__(self, run: LoggedRun) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run: Any = wandb.init(
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
