"""The panels of metrics that people see: on the page of `umbra dash`, in a plot and in a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPanel:
    title: str
    series: Mapping[str, str]  # labels by metric
    is_step_time: bool = False  # parts of `time/step_s`, stacked with its rest
    lowest_top: float | None = None  # the axis goes from 0 to at least this; None: it fits
    only_with: str = ""  # no panel without this metric, or if it is always 0


PANELS: Final[Sequence[MetricPanel]] = (
    MetricPanel(
        title="Reward",
        series={"rollout/reward_mean": "training", "eval/accuracy": "held-out accuracy"},
    ),
    MetricPanel(
        title="Truncated share",
        series={"rollout/truncated_share": "of completions"},
        lowest_top=0.1,
    ),
    MetricPanel(title="Entropy", series={"train/entropy": "of the policy, in nats"}),
    MetricPanel(
        title="KL",
        series={
            "train/reference_kl": "from the starting model",
            "train/behaviour_kl": "from the policy that sampled",
        },
        lowest_top=1e-3,  # less is the rounding of float32, and more hides that of bfloat16
        only_with="train/reference_kl",
    ),
    MetricPanel(title="Gradient norm", series={"train/grad_norm": "before clipping"}),
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
