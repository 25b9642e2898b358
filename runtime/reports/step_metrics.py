"""Steps and settings of a run from the files of its directory, for those who watch it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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
