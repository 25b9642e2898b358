"""The interface of metrics loggers, and the loggers that `run.loggers` names.

`MetricsLog` always writes metrics.jsonl, because umbra reads it itself to resume, plot and report.
The other loggers are for people.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

from umbra.runtime.errors import ConfigError, UmbraError
from umbra.trainer.reporting.eval_sample import EvalSample

logger = logging.getLogger(__name__)

MetricsRow = Mapping[str, float]

LOGGER_TARGETS: Final[Mapping[str, str]] = {
    "tensorboard": "umbra.trainer.reporting.tensorboard_logger:TensorboardLogger",
    "wandb": "umbra.trainer.reporting.wandb_logger:WandbLogger",
    "mlflow": "umbra.trainer.reporting.mlflow_logger:MlflowLogger",
}
"""Loggers by name, which is also the name of the package that each needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """The facts about a run that loggers may use.

    Attributes:
        folder: the run directory.
        name: shown in progress and report.
        settings: the whole config as `shown_settings`.
    """

    folder: Path
    name: str
    settings: Mapping[str, Any]


class MetricsLogger(Protocol):
    """Receives metrics of each step, and samples of each evaluation. Rank 0 owns it.

    It is a context manager, constructed with a `LoggedRun`. Writing may block as long as a step may
    wait for it. An UmbraError ends the run; after any other exception, only this logger is no
    longer used.
    """

    def write(self, step: int, row: MetricsRow) -> None:
        """Logs the metrics after `step` steps by name, such as `train/loss`."""
        ...

    def write_samples(self, step: int, samples: Sequence[EvalSample]) -> None:
        """Logs a few samples of an evaluation after `step` steps, the lowest reward first."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def logger_names(names: Sequence[str] | None) -> Sequence[str]:
    """The setting `run.loggers`; by default TensorBoard if it is installed."""
    if names is not None:
        return names
    return ["tensorboard"] if importlib.util.find_spec("tensorboard") else []


def check_loggers(names: Sequence[str] | None) -> None:
    """Raises ConfigError if the package that a logger needs is not installed."""
    for name in names or ():
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is not a package
            raise ConfigError(
                f"run.loggers names {name!r}, but the package {name} is not installed: run pip "
                f"install {name}, or leave it out"
            )


class MetricsLoggers:
    """Combines all loggers of `run.loggers`, and owns them. They start with the first row.

    Args:
        note: called with lines for the operator.
    """

    def __init__(self, names: Sequence[str], run: LoggedRun, note: Callable[[str], None]) -> None:
        self._names = list(names)
        self._run = run
        self._note = note
        self._open: dict[str, MetricsLogger] = {}
        self._failed: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name in list(self._open):  # loggers that failed hold connections, too
            self._use(name, lambda opened: opened.__exit__(kind, error, traceback))

    def write(self, step: int, row: MetricsRow) -> None:
        """Passes a row to all loggers. Raises their UmbraErrors."""
        self._use_all(lambda opened: opened.write(step, row))

    def write_samples(self, step: int, samples: Sequence[EvalSample]) -> None:
        """Passes samples to all loggers. Raises their UmbraErrors."""
        self._use_all(lambda opened: opened.write_samples(step, samples))

    def _logger(self, name: str) -> MetricsLogger:
        if name not in self._open:
            # As late as possible: the imports take seconds of processor time that engines can use.
            module, _, cls = LOGGER_TARGETS[name].partition(":")
            made: MetricsLogger = getattr(importlib.import_module(module), cls)(self._run)
            self._open[name] = made.__enter__()
        return self._open[name]

    def _use_all(self, use: Callable[[MetricsLogger], object]) -> None:
        for name in self._names:
            if name not in self._failed:
                self._use(name, use)

    def _use(self, name: str, use: Callable[[MetricsLogger], object]) -> None:
        try:
            use(self._logger(name))
        except UmbraError:
            raise
        except Exception as error:  # of any library; metrics.jsonl has the numbers
            logger.exception("the metrics logger %s failed", name)
            if name not in self._failed:
                self._note(f"run.loggers: {name} failed and is not used any more: {error}")
            self._failed.add(name)
