"""Steps and settings of a run, from files, and the panels of its metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_TAIL_NBYTES: Final = 256 << 10
"""Size of about fifty steps. The whole file of a long run would take seconds."""

Row = Mapping[str, float]


def last_steps(run_dir: Path) -> list[Row]:
    """The metrics of the last steps, the oldest first, without evaluations."""
    rows: list[Row] = []
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_NBYTES))
            lines = file.read(_TAIL_NBYTES).splitlines()
    except FileNotFoundError:
        return rows
    for line in lines:
        try:
            row: Row = json.loads(line)
        except ValueError:  # cut off, at the beginning or while it is written
            continue
        if "time/step_s" in row:
            rows.append(row)
    return rows


def recorded_setting(run_dir: Path, section: str, name: str) -> Any:
    try:
        return json.loads((run_dir / "settings.json").read_bytes())["settings"][section][name]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def recorded_choices(run_dir: Path) -> Mapping[str, Any]:
    """The settings of the last start that differ from their defaults, by `section.key`."""
    try:
        chosen: Mapping[str, Any] = json.loads((run_dir / "settings.json").read_bytes())["chosen"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return chosen


def total_steps(run_dir: Path) -> int:
    return recorded_setting(run_dir, "train", "steps") or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPanel:
    """A panel on the page of `umbra dash`, in a plot and in a report."""

    title: str
    # Labels by metric; a replay has the metrics of its run, too, as `run/...`.
    series: Mapping[str, str]
    is_step_time: bool = False  # parts of `time/step_s`, stacked with its rest
    lowest_top: float | None = None  # the axis goes from 0 to at least this; None: it fits
    only_with: str = ""  # no panel without this metric, or if it is always 0


PANELS: Final[Sequence[MetricPanel]] = (
    MetricPanel(
        title="Loss",
        series={"train/loss": "training", "eval/loss": "held-out"},
        only_with="sft/tokens",
    ),
    MetricPanel(
        title="Reward",
        series={"rollout/reward_mean": "training", "eval/accuracy": "held-out accuracy"},
    ),
    MetricPanel(
        title="Truncated share",
        series={"rollout/truncated_share": "of completions"},
        lowest_top=0.1,
    ),
    MetricPanel(
        title="Entropy",
        series={"train/entropy": "of the policy, in nats", "run/train/entropy": "in the run"},
    ),
    MetricPanel(
        title="KL",
        series={
            "train/reference_kl": "from the reference model",
            "train/behaviour_kl": "from the policy that sampled",
        },
        lowest_top=1e-3,  # less is the rounding of float32, and more hides that of bfloat16
        only_with="train/reference_kl",
    ),
    MetricPanel(
        title="KL from the teacher",
        series={"train/teacher_kl": "of sampled tokens"},
        lowest_top=1e-3,
        only_with="train/teacher_kl",
    ),
    MetricPanel(
        title="Variance that the critic explains",
        series={"critic/explained_variance": "share of the returns'"},
        only_with="critic/explained_variance",
    ),
    MetricPanel(
        title="Gradient norm",
        series={"train/grad_norm": "before clipping", "run/train/grad_norm": "in the run"},
    ),
    MetricPanel(
        title="Loss",
        series={"train/loss": "replayed", "run/train/loss": "in the run"},
        only_with="run/train/loss",
    ),
    MetricPanel(
        title="Behaviour KL",
        series={
            "train/behaviour_kl": "from the policy that sampled",
            "run/train/behaviour_kl": "in the run",
        },
        only_with="run/train/behaviour_kl",
    ),
    MetricPanel(
        title="Tokens per completion",
        series={
            "rollout/completion_len_mean": "training",
            "eval/completion_len_mean": "held-out",
        },
    ),
    MetricPanel(
        title="Seconds per step",
        series={
            "time/rollout_s": "waiting for rollouts",
            "time/train_s": "training",
            "time/sync_s": "weight sync",
            "time/sleep_s": "engines to sleep",
        },
        is_step_time=True,
    ),
    MetricPanel(title="Tokens per second", series={"rollout/tokens_per_s": "generated"}),
    MetricPanel(
        title="Idle share",
        series={"time/rank_idle_share": "trainer", "rollout/engine_idle_share": "engines"},
    ),
    MetricPanel(
        title="Staleness in steps",
        series={"rollout/staleness_mean": "mean", "rollout/staleness_max": "largest"},
        only_with="rollout/staleness_max",
    ),
    MetricPanel(
        title="GiB of the largest rank",
        series={
            "memory/sync_peak_gib": "in weight sync",
            "memory/generation_peak_gib": "in generation",
            "memory/train_peak_gib": "in training",
        },
        lowest_top=0.1,
    ),
)
REST: Final = "rest"
"""Label of a step's time outside of its parts, such as evaluations."""
