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
    """summary.json."""

    accuracy_before: float | None  # on held-out prompts, of the starting model; None: not evaluated
    accuracy_after: float | None  # the same at the end
    wall_s: float  # from the start of rank 0's process
    steps: int  # optimizer steps done, also before a resume
    engine_restarts: int
    stopped_by: str = ""  # the signal that ended the run early
    steps_before: int = 0  # steps before this start, which `wall_s` does not include
    reward_first: float | None = None  # mean over the first tenth of the steps
    reward_last: float | None = None  # mean over the last tenth
    files: Mapping[str, str] = field(default_factory=dict[str, str])  # path of each result by name


def write_summary(folder: Path, summary: Summary) -> Path:
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
    """Writes the page of `umbra dash` as one file, with its scripts, its styles and the answers
    that the server would give."""
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
