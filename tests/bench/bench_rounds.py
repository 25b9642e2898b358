"""Runs systems in turn, several rounds, and takes the median of each number.

Each round starts every system from scratch, one at a time, so that no system's idle services
disturb another's measurement; the order rotates from round to round.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench_hardware import describe_hardware
from bench_programs import BenchError, System, is_importable, peers_pythonpath, run_program

from umbra.runtime.process.prctl import become_subreaper

Facts = dict[str, Any]


def compare(
    bench: str,
    systems: Sequence[System],
    *,
    rounds: int,
    peer_python: str,
    duration_s: float,
    extra: Mapping[str, str] | None = None,
) -> Facts:
    """Facts per system, null for one that is not installed or fails.

    This process ends whatever a system leaves behind, so it must have no other children.

    Args:
        duration_s: of each measurement of calls; 0 measures starts only.
        extra: further programs of ours to run each round, by the system they belong to.
    """
    become_subreaper()
    pythons = {s.name: peer_python if s.is_peer else sys.executable for s in systems}
    present = [s for s in systems if is_importable(pythons[s.name], s.requires)]
    collected: dict[str, list[Facts]] = {s.name: [] for s in present}
    errors: dict[str, str] = {}
    with peers_pythonpath() as path:
        for idx in range(rounds):
            start = idx % len(present)
            for system in present[start:] + present[:start]:
                if system.name in errors:
                    continue
                show_progress(f"round {idx + 1} of {rounds}: {system.name}")
                try:
                    facts = run_program(system.program, pythons[system.name], path, duration_s)
                    if extra is not None and system.name in extra:
                        program = extra[system.name]
                        facts |= run_program(program, sys.executable, path, 0.0)
                except BenchError as error:
                    errors[system.name] = str(error)
                    continue
                collected[system.name].append(facts)
    medians = {name: median_of(rows) for name, rows in collected.items() if name not in errors}
    versions = {"python": medians.get("umbra", {}).get("python")}
    for name, facts in medians.items():
        versions[name] = facts.pop("version", None)
        facts.pop("python", None)
    result: Facts = {
        "bench": bench,
        "hardware": describe_hardware(),
        "versions": versions,
        "rounds": rounds,
    }
    result |= {s.name: medians.get(s.name) for s in systems}
    if errors:
        result["errors"] = errors
    return result


def median_of(rows: Sequence[Facts]) -> Facts:
    """The median of each number over the rounds; the most frequent of each text."""
    keys = dict.fromkeys(key for row in rows for key in row)
    medians: Facts = {}
    for key in keys:
        values = [row[key] for row in rows if key in row]
        if all(isinstance(value, int | float) for value in values):
            medians[key] = round(statistics.median(values), 4)
        else:
            medians[key] = statistics.mode(values)
    return medians


def show_progress(text: str) -> None:
    """Replaces the last line of a terminal on standard error."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
