"""`umbra bench rollout`: deltas of 64 engines in one manager, the ledger, and a weight update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from umbra.runtime.bench import deltas, ledger, update_gap
from umbra.runtime.bench.rounds import median_of

_LEDGER_RATIO: Final = 10
"""Trajectories through the ledger for one in flight: 100,000 by default, some seconds' worth."""
_NUM_UPDATES: Final = 8


def run(
    rounds: int, num_trajectories: int, duration_s: float, on_progress: Callable[[str], None]
) -> dict[str, Any]:
    """Medians over `rounds`; what is counted, `deltas.run`, `ledger.run` and `update_gap.run` say.

    Of `deltas.run` with `num_trajectories`, all; with a tenth and with five times as many,
    `cpu_us_per_run_at_...`: where the cost is linear, or better, it does not grow. Of the ledger
    `trajectories_per_s` and, as `ledger_...`, how long the loop was blocked. Of the update all,
    with engines that abort and resume, `..._keep_ms` with engines that freeze and go on, and
    `..._rolling_ms` with one engine after the other.
    """
    rows: list[dict[str, Any]] = []
    for idx in range(rounds):
        on_progress(f"round {idx + 1} of {rounds}: deltas")
        row: dict[str, Any] = dict(deltas.run(num_trajectories, duration_s))
        for size in (num_trajectories // 10, num_trajectories, 5 * num_trajectories):
            one = row if size == num_trajectories else deltas.run(size, duration_s)
            row[f"cpu_us_per_run_at_{size}"] = one["cpu_us_per_run"]
        on_progress(f"round {idx + 1} of {rounds}: ledger")
        finished = ledger.run(_LEDGER_RATIO * num_trajectories)
        row["trajectories_per_s"] = finished["trajectories_per_s"]
        for key in ("blocked_max_ms", "paced_blocked_max_ms", "idle_blocked_max_ms"):
            row[f"ledger_{key}"] = finished[key]
        on_progress(f"round {idx + 1} of {rounds}: weight updates")
        row |= update_gap.run(_NUM_UPDATES, "abort")
        kept = update_gap.run(_NUM_UPDATES, "keep")
        row["update_gap_keep_ms"] = kept["update_gap_ms"]
        rolling = update_gap.run(_NUM_UPDATES, "abort", update_waves=2)
        row["update_silence_rolling_ms"] = rolling["update_silence_ms"]
        rows.append(row)
    return median_of(rows)
