"""Names that docs/metrics.md and docs/run-directory.md explain."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_ROW = re.compile(r"^\| (`[^|]+`) \|", re.MULTILINE)
_NOT_METRICS = ("step", "time")


@cache
def documented(document: str) -> tuple[str, ...]:
    """What the tables of a document explain; parts in capitals stand for any text."""
    rows: list[str] = _ROW.findall((_DOCS / document).read_text())
    return tuple(name for row in rows for name in re.findall("`([^`]+)`", row))


def check_metrics(rows: Iterable[Iterable[str]]) -> None:
    """Asserts that docs/metrics.md has a line for each metric of the rows."""
    names = {name for row in rows for name in row}.difference(_NOT_METRICS)
    patterns = [re.sub("[A-Z]+", "[a-z0-9_]+", name) for name in documented("metrics.md")]
    any_of_them = re.compile("|".join(patterns))
    missing = sorted(name for name in names if not any_of_them.fullmatch(name))
    assert not missing, f"docs/metrics.md does not explain {missing}"


def check_run_directory(folder: Path) -> None:
    """Asserts that docs/run-directory.md explains each entry of a run directory."""
    names = {name.rstrip("/") for name in documented("run-directory.md")}
    missing = sorted({entry.name for entry in folder.iterdir()} - names)
    assert not missing, f"docs/run-directory.md does not explain {missing}"
