"""Benchmark results for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_NOT_SYSTEMS = frozenset({"bench", "hardware", "versions", "rounds", "errors"})


def print_result(result: dict[str, Any], console: Console) -> None:
    """One row a number, one column a system; what failed below."""
    others = {key: value for key, value in result.items() if key not in _NOT_SYSTEMS}
    systems = [key for key, value in others.items() if value is None or isinstance(value, dict)]
    rows: dict[str, list[str]] = {}
    for idx, system in enumerate(systems):
        facts: dict[str, Any] = result[system] or {}
        for key, value in facts.items():
            rows.setdefault(key, ["-"] * len(systems))[idx] = _text(value)
    hardware = result["hardware"]
    table = Table(
        title=f"{result['bench']}: medians of {result['rounds']} rounds on "
        f"{hardware['cores']} cores of {hardware['cpu']}",
        box=box.SIMPLE,
    )
    table.add_column("", no_wrap=True)
    for system in systems:
        table.add_column(_heading(system, result), justify="right")
    for key, cells in rows.items():
        table.add_row(key, *cells)
    console.print(table)
    for key, value in others.items():
        if key not in systems:
            console.print(f"{key}: {_text(value)}")
    _print_missing(result, systems, console)


def _heading(system: str, result: dict[str, Any]) -> str:
    version = result["versions"].get(system)
    return f"{system}\n{version}" if version else system


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if value < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _print_missing(result: dict[str, Any], systems: Sequence[str], console: Console) -> None:
    errors: dict[str, str] = result.get("errors", {})
    for system in systems:
        if result[system] is None and system not in errors:
            console.print(f"{system} is not installed in the peers' environment")
    for system, error in errors.items():
        console.print(f"{system} failed: {error}", markup=False)
