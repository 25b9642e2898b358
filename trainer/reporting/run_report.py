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
from umbra.runtime.settings import chosen_settings, shown_settings
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.reporting.metrics_log import merge_steps
from umbra.trainer.run_files import write_json, write_text

T = TypeVar("T")
Rows = Sequence[Mapping[str, float]]
_REWARD: Final = "rollout/reward_mean"
_COLUMNS: Final[Mapping[str, str]] = {
    _REWARD: "training reward",
    "eval/accuracy": "held-out accuracy",
    "rollout/tokens_per_s": "tokens per second",
    "rollout/completion_len_mean": "tokens per completion",
    "rollout/truncated_share": "truncated, share",
    "train/entropy": "entropy",
    "train/loss": "loss",
    "train/grad_norm": "gradient norm",
    "time/step_s": "seconds",
    "time/rank_idle_share": "trainer idle, share",
    "rollout/engine_idle_share": "engines idle, share",
}
_FAULTS: Final[Mapping[str, str]] = {
    "rollout/engines_lost": "Engines lost",
    "sync/failed_engines": "Engines that failed in a weight sync",
    "rollout/refilled_tokens": "Tokens whose keys were computed again",
    "rollout/lost_tokens": "Tokens generated and lost",
}
"""Counts of each step that are above 0 only after faults."""
_FAILURES: Final[Mapping[str, str]] = {
    "rollout/dropped_reward_failed": "Prompts dropped because the reward function failed",
    "rollout/dropped_agent_loop_failed": "Prompts dropped because the agent loop failed",
}
"""The same for counts of the whole run so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """summary.json.

    Attributes:
        accuracy_before, accuracy_after: on held-out prompts, of the starting model and at the
            end; None where that was not evaluated.
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
    settings: TrainerConfig,
    plot: Path,
) -> None:
    """Writes an HTML page, which embeds its plot and needs no other file.

    Args:
        samples: of evaluations, by their step; as in eval_samples.jsonl.
    """
    jinja: Any = importlib.import_module("jinja2")
    environment = jinja.Environment(autoescape=True)
    environment.filters["printable"] = escape_unprintable
    environment.filters["number"] = _number
    template = environment.from_string(_PAGE)
    rows = merge_steps(rows)
    page = template.render(
        name=name,
        summary=asdict(summary),
        faults=_faults(rows),
        plot=base64.b64encode(plot.read_bytes()).decode(),
        columns={key: word for key, word in _COLUMNS.items() if any(key in row for row in rows)},
        rows=_thin(rows),
        evaluations=_thin(sorted(samples.items())),
        folder=Path.cwd(),
        run_dir=path.parent,
        epochs=settings.train.epochs,
        chosen={key: json.dumps(value) for key, value in chosen_settings(settings).items()},
        settings=json.dumps(shown_settings(settings), indent=2, default=str),
    )
    write_text(path, page)


def _faults(rows: Rows) -> list[str]:
    """What the run survived, one line for each kind."""
    lines: list[str] = []
    for key, word in _FAULTS.items():
        steps = [row["step"] for row in rows if row.get(key)]
        if steps:
            total = sum(row[key] for row in rows if key in row)
            first = ", ".join(f"{step:.0f}" for step in steps[:10])
            more = f" and {len(steps) - 10} more" if len(steps) > 10 else ""
            lines.append(f"{word}: {total:.0f} (by step {first}{more})")
    for key, word in _FAILURES.items():
        total = max((row[key] for row in rows if key in row), default=0.0)
        if total:
            lines.append(f"{word}: {total:.0f}")
    return lines


def _number(value: float) -> str:
    """With four digits, and without an exponent where that is short."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def _thin(rows: Sequence[T], most: int = 50) -> list[T]:
    """At most about `most` rows, evenly spread, including the last one."""
    stride = max(1, -(-len(rows) // most))
    kept = list(rows[::stride])
    if rows and kept[-1] is not rows[-1]:
        kept.append(rows[-1])
    return kept


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ name }} - umbra</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 1rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-size: 14px }
td, th { padding: .2rem .6rem; text-align: right; vertical-align: top }
th { border-bottom: 1px solid #888; vertical-align: bottom }
img { max-width: 100% }
pre { background: #f4f4f4; padding: .5rem; overflow: auto; font-size: 14px; margin: .2rem 0 }
.wide { overflow-x: auto }
.sample { border-top: 1px solid #ccc; padding: .5rem 0 }
.sample pre { white-space: pre-wrap; overflow-wrap: anywhere }
</style></head><body>
<h1>{{ name }}</h1>
<h2>Results</h2>
<ul>
{% if summary.accuracy_after is not none %}
<li>Held-out accuracy:
{% if summary.accuracy_before is not none %}
{{ "%.3f" | format(summary.accuracy_before) }} before training,
{% endif %}
<strong>{{ "%.3f" | format(summary.accuracy_after) }}</strong> after</li>
{% endif %}
{% if summary.reward_last is not none %}
<li>Mean training reward: {{ summary.reward_first | number }} in the first tenth of the
steps, <strong>{{ summary.reward_last | number }}</strong> in the last</li>
{% endif %}
<li>{{ summary.steps }} optimizer steps{% if summary.steps_before %},
{{ summary.steps_before }} of them before the run was resumed{% endif %}</li>
<li>{{ "%.0f" | format(summary.wall_s) }} seconds
{%- if summary.steps_before %} since then{% endif %}</li>
{% if summary.files.model %}<li>The trained model is in {{ summary.files.model }}.</li>{% endif %}
</ul>
<h2>Settings</h2>
<p>Those that differ from their defaults:</p>
<pre>{% for key, value in chosen.items() %}{{ key }} = {{ value | printable }}
{% endfor %}</pre>
<details><summary>All settings</summary><pre>{{ settings | printable }}</pre></details>
<h2>Faults survived</h2>
{% if faults or summary.engine_restarts %}
<ul>
{% for fault in faults %}<li>{{ fault }}</li>{% endfor %}
{% if summary.engine_restarts %}
<li>Engines restarted since the run was started or resumed: {{ summary.engine_restarts }}</li>
{% endif %}
</ul>
<p>The causes are in {{ run_dir / "logs" }}.</p>
{% else %}
<p>No engine failed, and nothing that was generated was lost.</p>
{% endif %}
<h2>Metrics over the steps</h2>
<p><img alt="metrics over steps" src="data:image/png;base64,{{ plot }}"></p>
<details><summary>in numbers</summary><div class="wide"><table>
<tr><th>step</th>{% for word in columns.values() %}<th>{{ word }}</th>{% endfor %}</tr>
{% for row in rows %}<tr><td>{{ row["step"] }}</td>
{% for column in columns %}
<td>{{ row[column] | number if column in row else "" }}</td>
{% endfor %}</tr>
{% endfor %}</table></div></details>
{% if evaluations %}
<h2>Samples of the evaluations</h2>
<p>The held-out prompts with the lowest and the highest rewards.</p>
{% for step, samples in evaluations %}
<details{% if loop.last %} open{% endif %}><summary>after step {{ step }}</summary>
{% for sample in samples %}
<div class="sample">
Reward {{ sample.reward | number }}, {{ sample.num_tokens }} tokens,
ended by {{ sample.finish_reason }}
<pre>{{ sample.prompt | printable }}</pre>
<pre>{{ sample.completion | printable }}</pre>
</div>
{% endfor %}
</details>
{% endfor %}
<p>Samples of the training: <code>umbra samples {{ run_dir }} --worst 3</code></p>
{% endif %}
<h2>How to train further</h2>
<p>Start the same command again in {{ folder }}, with these settings at its end, to resume from the
last checkpoint. Choose the number of steps or epochs; it includes what is done.</p>
<pre>run.resume=auto {% if epochs %}train.epochs={{ 2 * epochs }}
{%- else %}train.steps={{ 2 * summary.steps }}{% endif %}</pre>
</body></html>
"""
