"""A benchmark's result: medians, printed as a table or as one JSON object."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

_HEADINGS: Final = frozenset({"bench", "hardware", "versions", "rounds", "errors"})
_PLAIN_WIDTH: Final = 120
"""Columns of a table that goes to a file or pipe."""


def describe_hardware() -> dict[str, Any]:
    """Processor, cores this process may use, memory in bytes, load while starting, kernel."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def median_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each number over the rounds; the most frequent of each text."""
    medians: dict[str, Any] = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        is_text = isinstance(values[0], str)
        medians[key] = statistics.mode(values) if is_text else round(statistics.median(values), 4)
    return medians


def print_result(result: dict[str, Any], *, as_json: bool) -> int:
    """The exit status of the script: 1 if umbra itself was to be measured and could not be.

    The table has a row for each number and a column for each system.
    """
    if as_json:
        print(json.dumps(result))
        return 1 if result.get("umbra", {}) is None else 0
    others = {key: value for key, value in result.items() if key not in _HEADINGS}
    systems = [key for key, value in others.items() if value is None or isinstance(value, dict)]
    rows: dict[str, list[str]] = {}
    for idx, system in enumerate(systems):
        facts: dict[str, Any] = result[system] or {}
        for key, value in facts.items():
            rows.setdefault(key, ["-"] * len(systems))[idx] = _text(value)
    title = "{bench}: medians of {rounds} rounds on {hardware[cores]} cores of {hardware[cpu]}"
    table = Table("", title=title.format(**result), box=box.SIMPLE)
    for system in systems:
        table.add_column(f"{system}\n{result['versions'].get(system, '')}", justify="right")
    for key, cells in rows.items():
        table.add_row(key, *cells)
    console = Console()
    console = console if console.is_terminal else Console(width=_PLAIN_WIDTH)
    console.print(table)
    errors: dict[str, str] = result.get("errors", {})
    for key, value in others.items():
        if value is None and key not in errors:
            console.print(f"{key} is not installed")
        elif key not in systems:
            console.print(f"{key}: {_text(value)}")
    for system, error in errors.items():
        console.print(f"{system} failed: {error}", markup=False)
    return 1 if result.get("umbra", {}) is None else 0


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if value < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
