"""Writes the results of a run: summary.json and an HTML page."""

from __future__ import annotations

import base64
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from umbra.runtime.escaping import escape_unprintable
from umbra.trainer.run_files import write_json, write_text

T = TypeVar("T")
Rows = Sequence[Mapping[str, float]]
_REWARD: Final = "rollout/reward_mean"
_ACCURACY: Final = "eval/accuracy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """summary.json.

    Attributes:
        accuracy_before, accuracy_after: on held-out prompts, of the starting model and at the
            end; None if nothing was evaluated.
        wall_s: from the start of rank 0's process.
        steps: optimizer steps done, including those before a resume.
        steps_before: those before this start, which `wall_s` does not include.
        engine_restarts: how often engines were restarted.
        stopped_by: the signal that ended the run early; "" if it ran to its end.
        reward_first, reward_last: means over the first and last tenth of the steps.
        files: path of each result by name.
    """

    accuracy_before: float | None
    accuracy_after: float | None
    wall_s: float
    steps: int
    engine_restarts: int
    stopped_by: str = ""
    steps_before: int = 0
    reward_first: float | None = None
    reward_last: float | None = None
    files: Mapping[str, str] = field(default_factory=dict[str, str])


def write_summary(folder: Path, summary: Summary) -> Path:
    """Writes summary.json."""
    path = folder / "summary.json"
    write_json(path, asdict(summary))
    return path


def reward_ends(rows: Rows) -> tuple[float | None, float | None]:
    """Mean reward over the first and the last tenth of the steps."""
    rewards = [row[_REWARD] for row in rows if _REWARD in row]
    if not rewards:
        return None, None
    span = max(1, len(rewards) // 10)
    return sum(rewards[:span]) / span, sum(rewards[-span:]) / span


def write_report(
    path: Path,
    name: str,
    summary: Summary,
    *,
    rows: Rows,
    samples: Mapping[int, Sequence[Mapping[str, Any]]],
    settings: Mapping[str, Any],
    plot: Path,
) -> None:
    """Writes an HTML page, which embeds its plot and needs no other file.

    Args:
        samples: of evaluations, by their step; as in eval_samples.jsonl.
    """
    jinja: Any = importlib.import_module("jinja2")
    environment = jinja.Environment(autoescape=True)
    environment.filters["printable"] = escape_unprintable
    template = environment.from_string(_PAGE)
    page = template.render(
        name=name,
        summary=asdict(summary),
        plot=base64.b64encode(plot.read_bytes()).decode(),
        columns=_table_columns(rows),
        rows=_thin(rows),
        evaluations=_thin(sorted(samples.items())),
        settings=json.dumps(settings, indent=2, default=str),
    )
    write_text(path, page)


def _table_columns(rows: Rows) -> list[str]:
    names = (
        _REWARD,
        _ACCURACY,
        "rollout/tokens_per_s",
        "rollout/completion_len_mean",
        "train/loss",
        "train/grad_norm",
        "time/step_s",
        "time/rank_idle_share",
        "rollout/engine_idle_share",
    )
    return [name for name in names if any(name in row for row in rows)]


def _thin(rows: Sequence[T], most: int = 50) -> list[T]:
    """At most about `most` rows, evenly spread, including the last one."""
    stride = max(1, -(-len(rows) // most))
    kept = list(rows[::stride])
    if rows and kept[-1] is not rows[-1]:
        kept.append(rows[-1])
    return kept


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ name }} - umbra</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: right }
th { border-bottom: 1px solid #888 } img { max-width: 100% }
pre { background: #f4f4f4; padding: 1rem; overflow: auto }
.sample td { text-align: left; vertical-align: top }
.sample pre { margin: 0; padding: .2rem .5rem; white-space: pre-wrap; overflow-wrap: anywhere }
</style></head><body>
<h1>{{ name }}</h1>
<table>
{% for key, value in summary.items() if value is not none and key != "files" and value != "" %}
<tr><th style="text-align: left">{{ key }}</th>
<td>{{ "%.4g" | format(value) if value is number else value }}</td></tr>
{% endfor %}
</table>
<p><img alt="metrics over steps" src="data:image/png;base64,{{ plot }}"></p>
<table><tr><th>step</th>{% for column in columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for row in rows %}<tr><td>{{ row["step"] }}</td>
{% for column in columns %}
<td>{{ "%.4g" | format(row[column]) if column in row else "" }}</td>
{% endfor %}</tr>
{% endfor %}</table>
{% if evaluations %}
<h2>Samples of the evaluations</h2>
<p>The held-out prompts with the lowest and the highest rewards.</p>
{% for step, samples in evaluations %}
<details{% if loop.last %} open{% endif %}><summary>after step {{ step }}</summary>
<table class="sample">
<tr><th>prompt</th><th>completion</th><th>reward</th><th>tokens</th><th>end</th></tr>
{% for sample in samples %}
<tr><td><pre>{{ sample.prompt | printable }}</pre></td>
<td><pre>{{ sample.completion | printable }}</pre></td>
<td>{{ "%.4g" | format(sample.reward) }}</td><td>{{ sample.num_tokens }}</td>
<td>{{ sample.finish_reason }}</td></tr>
{% endfor %}
</table></details>
{% endfor %}
{% endif %}
<h2>Settings</h2><pre>{{ settings }}</pre>
</body></html>
"""
