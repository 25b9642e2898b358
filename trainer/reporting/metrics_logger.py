"""Where the numbers of each step go: one interface, and the loggers that `run.loggers` names.

metrics.jsonl is always written, by `MetricsLog`, because umbra reads it itself: to resume, to plot
and to report. The other loggers are for people.
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

logger = logging.getLogger(__name__)

MetricsRow = Mapping[str, float]

LOGGER_TARGETS: Final[Mapping[str, str]] = {
    "tensorboard": "umbra.trainer.reporting.tensorboard_logger:TensorboardLogger",
    "wandb": "umbra.trainer.reporting.wandb_logger:WandbLogger",
    "mlflow": "umbra.trainer.reporting.mlflow_logger:MlflowLogger",
}
"""By name, which is also the name of the package that each of them needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """What a logger may say about the run.

    Attributes:
        folder: the run directory.
        name: as progress and report show it.
        settings: the whole config as plain data.
    """

    folder: Path
    name: str
    settings: Mapping[str, Any]


class MetricsLogger(Protocol):
    """Takes the numbers of each step. Rank 0 owns it; it is a context manager.

    It is made with a `LoggedRun`. `write` may block for as long as a step may wait for it. An
    UmbraError ends the run; with any other exception, only this logger is given up.
    """

    def write(self, step: int, row: MetricsRow) -> None:
        """Logs the numbers after `step` steps by their names, such as `train/loss`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def logger_names(wanted: Sequence[str] | None) -> Sequence[str]:
    """The setting `run.loggers`; its default is TensorBoard where that is installed."""
    if wanted is not None:
        return wanted
    return ["tensorboard"] if importlib.util.find_spec("tensorboard") else []


def check_loggers(wanted: Sequence[str] | None) -> None:
    """Raises ConfigError where the package that a logger needs is not installed."""
    for name in wanted or ():
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is no package
            raise ConfigError(
                f"run.loggers names {name!r}, but the package {name} is not installed: run pip "
                f"install {name}, or leave it out"
            )


class MetricsLoggers:
    """All loggers of `run.loggers` as one; owns them. They start with the first row.

    Args:
        note: takes lines for the person who runs the job.
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
        for name in list(self._open):  # those that failed hold connections, too
            self._use(name, lambda opened: opened.__exit__(kind, error, traceback))

    def write(self, step: int, row: MetricsRow) -> None:
        """Gives a row to all loggers. Raises the UmbraErrors of these."""
        for name in self._names:
            if name not in self._failed:
                self._use(name, lambda opened: opened.write(step, row))

    def _logger(self, name: str) -> MetricsLogger:
        if name not in self._open:
            # Late: the libraries' imports take seconds, which engines can use.
            module, _, cls = LOGGER_TARGETS[name].partition(":")
            made: MetricsLogger = getattr(importlib.import_module(module), cls)(self._run)
            self._open[name] = made.__enter__()
        return self._open[name]

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
