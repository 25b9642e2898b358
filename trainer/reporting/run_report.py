"""Writes the results of a run: summary.json, and report.html with the page of `umbra dash`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Final
from urllib.parse import quote

from umbra.runtime.dash.run_view import RunView
from umbra.trainer.world.run_files import write_json, write_text

Rows = Sequence[Mapping[str, float]]
_INLINE: Final = "'unsafe-inline'"
_POLICY: Final = f"default-src 'none'; img-src data:; style-src {_INLINE}; script-src {_INLINE}"
_REWARD: Final = "rollout/reward_mean"


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


def write_report(path: Path, run_dir: Path) -> None:
    """Writes the page of `umbra dash` as one file, which loads nothing: its scripts, its styles and
    the answers that the server would give are inside."""
    static = files("umbra.runtime.dash") / "static"
    recorded = asyncio.run(RunView(run_dir).recorded()).replace("<", "\\u003c")

    def inlined(found: re.Match[str]) -> str:
        text = (static / found["name"]).read_text(encoding="utf-8")
        if found["name"].endswith(".svg"):
            return found[0].replace(found["name"], f"data:image/svg+xml,{quote(text)}")
        kind = "style" if found["name"].endswith(".css") else "script"
        return f"<{kind}>{text}</{kind}>"

    page = (static / "index.html").read_text(encoding="utf-8")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    page = page.replace("<title>", f"{policy}\n<title>", 1)
    page = re.sub(r'<(link|script) .*(href|src)="(?P<name>.+)">(</script>)?', inlined, page)
    data = f'<script id="recorded" type="application/json">{recorded}</script>'
    write_text(path, page.replace("<script>", f"{data}\n<script>", 1))
