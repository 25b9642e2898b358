"""Plots a run's metrics: at its end, and with `umbra plot` at any time."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from umbra.runtime.disk import writing_output
from umbra.runtime.errors import ConfigError, DataError, how_to_install
from umbra.runtime.reports.run_metrics import PANELS, REST
from umbra.trainer.checkpoint.run_dir import RunDir
from umbra.trainer.reporting.metrics_loggers import merge_steps, read_metrics

Rows = Sequence[Mapping[str, float]]
_HEIGHT: Final = 2.0
"""A panel's height in inches. Lower panels have no room for titles; higher ones are long."""
_FEW: Final = 40
"""Points of a series that are drawn as such: a single one has no line. More would hide the line."""
_FORMATS: Final = (".svg", ".png", ".pdf")


@dataclass(frozen=True, slots=True)
class Series:
    label: str
    steps: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """Series that share an axis; stacked ones add up, and have the same steps."""

    title: str
    series: Sequence[Series]
    is_stacked: bool = False
    # The axis begins at 0 and reaches at least this; None: it fits the values.
    lowest_top: float | None = None


def run(arguments: argparse.Namespace) -> int:
    """Draws what has been measured so far; the run may be in progress. Raises ConfigError if
    matplotlib is missing or the file cannot be written, DataError without metrics."""
    run_dir = RunDir(Path(arguments.run_dir))
    path = Path(arguments.output or run_dir.plot)
    if path.suffix not in _FORMATS:
        raise ConfigError(f"-o {path}: end the name with {', '.join(_FORMATS)}")
    rows = _read(run_dir)
    with writing_output(path):
        save_plot(rows, path, run_dir.path.absolute().name)
    print(path)
    return 0


def save_plot(rows: Rows, path: Path, title: str) -> None:
    """Draws into a file, whose suffix decides the format."""
    draw(panels(rows), title).savefig(path, dpi=150)


def panels(rows: Rows) -> list[Panel]:
    """The measured metrics, in the order of the page."""
    found: list[Panel] = []
    rows = merge_steps(rows)
    for wanted in PANELS:
        if wanted.only_with and not any(row.get(wanted.only_with) for row in rows):
            continue
        if wanted.is_step_time:
            series = _times(rows, wanted.series)
        else:
            series = [_series(rows, name, label) for name, label in wanted.series.items()]
        series = [one for one in series if one.steps]
        if series:
            found.append(
                Panel(
                    wanted.title,
                    series,
                    is_stacked=wanted.is_step_time,
                    lowest_top=wanted.lowest_top,
                )
            )
    return found


def draw(panels: Sequence[Panel], title: str) -> Any:
    """A matplotlib figure with the panels below each other; without panels, only the title."""
    try:
        module: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(f"drawing a run needs matplotlib: {how_to_install('plot')}") from error
    # Narrow enough for a phone, so legends are above the panels.
    figure = module.Figure(figsize=(6, _HEIGHT * max(1, len(panels))), layout="constrained")
    figure.suptitle(title)
    if not panels:
        return figure
    grid = figure.subplots(len(panels), sharex=True, squeeze=False)
    for (axes,), panel in zip(grid, panels, strict=True):
        _draw_stack(axes, panel.series) if panel.is_stacked else _draw_lines(axes, panel.series)
        if panel.lowest_top is not None:
            highest = max(value for one in panel.series for value in one.values)
            axes.set_ylim(bottom=0.0, top=max(1.05 * highest, panel.lowest_top))
        axes.set_ylabel(panel.title)
        axes.grid(visible=True, alpha=0.3)
        above = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderpad": 0.1}
        axes.legend(**above, ncols=3, frameon=False, fontsize="small", columnspacing=1.0)
    grid[-1][0].set_xlabel("step")
    return figure


def _read(run_dir: RunDir) -> Rows:
    if not run_dir.metrics.exists():
        raise DataError(
            f"{run_dir.path} is not a run's folder, it has no metrics.jsonl: give the folder that "
            "a training run's config calls run.dir"
        )
    try:
        rows = read_metrics(run_dir.metrics)
    except OSError as error:
        raise DataError(f"{run_dir.metrics} cannot be read: {error.strerror}") from error
    if not panels(rows):
        raise DataError(f"{run_dir.metrics} has no metrics yet: the run's first step is not done")
    return rows


def _draw_stack(axes: Any, series: Sequence[Series]) -> None:
    """One area for each series: a bar for each step would take a minute in a run of 20,000."""
    steps = series[0].steps
    edges = [*(step - 0.5 for step in steps), steps[-1] + 0.5]
    bottom = [0.0] * len(edges)
    for one in series:
        values = [*one.values, one.values[-1]]
        top = [low + value for low, value in zip(bottom, values, strict=True)]
        axes.fill_between(edges, bottom, top, step="post", linewidth=0, label=one.label)
        bottom = top


def _draw_lines(axes: Any, series: Sequence[Series]) -> None:
    for one in series:
        size = 5.0 if len(one.steps) < _FEW else 0.0
        axes.plot(one.steps, one.values, ".-", linewidth=1.2, markersize=size, label=one.label)


def _series(rows: Rows, name: str, label: str) -> Series:
    points = [(row["step"], row[name]) for row in rows if name in row]
    return Series(label, [step for step, _ in points], [value for _, value in points])


def _times(rows: Rows, names: Mapping[str, str]) -> list[Series]:
    """The parts of whole steps, and the time in none of them, such as evaluations."""
    whole = [row for row in rows if "time/step_s" in row and all(name in row for name in names)]
    steps = [row["step"] for row in whole]
    parts = [Series(label, steps, [row[name] for row in whole]) for name, label in names.items()]
    other = [max(0.0, row["time/step_s"] - sum(row[name] for name in names)) for row in whole]
    return [*parts, Series(REST, steps, other)]
