"""`umbra plot`: a run's metrics.jsonl as one picture. matplotlib is imported when it is drawn.

panels(rows)   what is drawn: reward, KL, the steps' time and memory, as far as it was measured
draw(...)      how
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from umbra.runtime.errors import ConfigError, DataError
from umbra.trainer.files import writing
from umbra.trainer.metrics import read_metrics

Rows = Sequence[Mapping[str, float]]
_PANELS: Final[Mapping[str, Mapping[str, str]]] = {
    "reward": {"rollout/reward_mean": "training reward", "eval/accuracy": "held-out accuracy"},
    "KL": {
        "train/behaviour_kl": "from what sampled the tokens",
        "train/reference_kl": "from the starting model",
    },
    "seconds a step": {
        "time/rollout_s": "rollout",
        "time/sync_s": "sync",
        "time/sleep_s": "sleep",
        "time/train_s": "train",
    },
    "GiB of the rank with most": {
        f"memory/{phase}_{what}_gib": f"{phase}, {what}"
        for phase in ("sync", "generation", "train")
        for what in ("peak", "allocated")
    },
}
_TIME: Final = "seconds a step"
_OTHER: Final = "other"
_FORMATS: Final = (".svg", ".png", ".pdf")


@dataclass(frozen=True, slots=True)
class Series:
    """One number over the steps in which it was measured."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """Series with one axis; stacked ones add up, and have the same steps."""

    title: str
    series: Sequence[Series]
    is_stacked: bool = False


def run(arguments: argparse.Namespace) -> int:
    """Draws what has been measured so far; the run may be under way.

    Raises:
        ConfigError: matplotlib is missing, or the file's name is of no format.
        DataError: there are no metrics.
    """
    run_dir = Path(arguments.run_dir)
    path = Path(arguments.output or run_dir / "metrics.svg")
    if path.suffix not in _FORMATS:
        raise ConfigError(f"-o {path}: end the name with {', '.join(_FORMATS)}")
    rows = read_metrics(run_dir / "metrics.jsonl")
    if not rows:
        raise DataError(
            f"{run_dir / 'metrics.jsonl'} has no metrics yet; give a training run's run.dir"
        )
    figure = draw(panels(rows), run_dir.absolute().name)
    with writing("write", path):
        figure.savefig(path, dpi=120)
    print(path)
    return 0


def panels(rows: Rows) -> list[Panel]:
    """What was measured, in the order of the page."""
    found: list[Panel] = []
    for title, names in _PANELS.items():
        if title == _TIME:
            series = _times(rows, names)
        else:
            series = [_series(rows, name, label) for name, label in names.items()]
        series = [one for one in series if one.steps]
        if series:
            found.append(Panel(title, series, is_stacked=title == _TIME))
    return found


def draw(panels: Sequence[Panel], title: str) -> Any:
    """A matplotlib figure, one panel below the other.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        module: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError("umbra plot needs matplotlib: pip install 'umbra-rl[plot]'") from error
    figure = module.Figure(figsize=(9, 2.6 * len(panels)), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(len(panels), sharex=True, squeeze=False)
    for (axes,), panel in zip(grid, panels, strict=True):
        _draw_stack(axes, panel.series) if panel.is_stacked else _draw_lines(axes, panel.series)
        axes.set_ylabel(panel.title)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    grid[-1][0].set_xlabel("step")
    return figure


def _draw_stack(axes: Any, series: Sequence[Series]) -> None:
    bottom = [0.0] * len(series[0].steps)
    for one in series:
        axes.bar(one.steps, one.values, bottom=bottom, width=1.0, label=one.label)
        bottom = [low + value for low, value in zip(bottom, one.values, strict=True)]


def _draw_lines(axes: Any, series: Sequence[Series]) -> None:
    for one in series:
        axes.plot(one.steps, one.values, ".-", linewidth=1.2, markersize=3, label=one.label)


def _series(rows: Rows, name: str, label: str) -> Series:
    points = [(row["step"], row[name]) for row in rows if name in row]
    return Series(label, [step for step, _ in points], [value for _, value in points])


def _times(rows: Rows, names: Mapping[str, str]) -> list[Series]:
    """The parts of whole steps, and what is left, such as evaluations."""
    whole = [row for row in rows if "time/step_s" in row and all(name in row for name in names)]
    steps = [row["step"] for row in whole]
    parts = [Series(label, steps, [row[name] for row in whole]) for name, label in names.items()]
    rest = [max(0.0, row["time/step_s"] - sum(row[name] for name in names)) for row in whole]
    return [*parts, Series(_OTHER, steps, rest)]
