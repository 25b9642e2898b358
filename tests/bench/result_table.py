"""Prints a benchmark's result: a table, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

_NOT_SYSTEMS: Final = frozenset({"bench", "hardware", "versions", "rounds", "errors"})
_PLAIN_WIDTH: Final = 120
"""Columns of a table that goes to a file or pipe."""


def print_result(result: dict[str, Any], *, as_json: bool) -> int:
    """The exit status of the script: 1 if umbra itself was to be measured and could not be."""
    if as_json:
        print(json.dumps(result))
    else:
        console = Console()
        _print_table(result, console if console.is_terminal else Console(width=_PLAIN_WIDTH))
    return 1 if result.get("umbra", {}) is None else 0


def _print_table(result: dict[str, Any], console: Console) -> None:
    """Has one row per number and one column per system; names what failed below."""
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
