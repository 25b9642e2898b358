"""What one rollout manager takes in, its calls of workers, and the gap of a weight update.

Medians over the rounds, which take two minutes each on two cores; `delta_bench.py`,
`worker_bench.py`, `ledger_bench.py` and `update_gap.py` define the numbers:

- everything that `delta_bench` measures with `--trajectories` in flight; and
  `cpu_us_per_run_at_...` with a tenth and five times as many, which does not grow where the cost is
  linear or better
- with the ledger and 64 engines of 1,000, 5,000 and 10,000 tokens/s each, at a tick of 50 ms:
  `recorded_core_share_at_...`; and with the last of these as `recorded_...`: tokens and requests a
  second at full speed
- with completions of 64 tokens in place of 512, and as `short_...`: the same without the ledger
- everything that `worker_bench` measures with 64 workers
- `trajectories_per_s` of the ledger, and as `ledger_...` how long the loop was blocked
- everything that `update_gap` measures with engines that abort and resume, and
  `update_gap_keep_ms` with engines that freeze and continue

    python tests/bench/rollout.py [--rounds 2] [--trajectories 10000] [--seconds 3] [--json]
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any, Final

import delta_bench
import ledger_bench
import update_gap
import worker_bench
from bench_hardware import describe_hardware
from bench_options import options_parser, positive
from bench_rounds import median_of, show_progress
from result_table import print_result

from umbra.runtime.cli.umbra_command import umbra_version

_LEDGER_RATIO: Final = 10
"""Trajectories through the ledger for one in flight: 100,000 by default, some seconds' worth."""
_NUM_UPDATES: Final = 8
_NUM_WORKERS: Final = 64
_SHORT_LEN: Final = 64
_ENGINE_RATES: Final = (1_000, 5_000, 10_000)
_RATES: Final = ("tokens_per_s", "tokens_per_cpu_s", "requests_per_s", "requests_per_cpu_s")


def main() -> int:
    parser = options_parser(__doc__, rounds=2)
    parser.add_argument(
        "--trajectories", type=positive, default=10_000, help="in flight (default 10000)"
    )
    parser.add_argument(
        "--seconds", type=positive, default=3, help="of each measurement of rates (default 3)"
    )
    given = parser.parse_args()
    result: dict[str, Any] = {
        "bench": "rollout",
        "hardware": describe_hardware(),
        "versions": {name: version(name) for name in ("numpy", "pyzmq", "torch")}
        | {"umbra": umbra_version()},
        "rounds": given.rounds,
    }
    rows: list[dict[str, Any]] = []
    for idx in range(given.rounds):
        show_progress(f"round {idx + 1} of {given.rounds}")
        rows.append(_round(given.trajectories, given.seconds))
    return print_result(result | {"umbra": median_of(rows)}, as_json=given.json)


def _round(num_trajectories: int, duration_s: float) -> dict[str, Any]:
    row: dict[str, Any] = dict(delta_bench.run(num_trajectories, duration_s))
    for size in (num_trajectories // 10, num_trajectories, 5 * num_trajectories):
        one = row if size == num_trajectories else delta_bench.run(size, duration_s)
        row[f"cpu_us_per_run_at_{size}"] = one["cpu_us_per_run"]
    recorded: dict[str, float] = {}
    for rate in _ENGINE_RATES:
        size = delta_bench.num_trajectories_for(rate)
        recorded = delta_bench.run(size, duration_s, has_ledger=True)
        row[f"recorded_core_share_at_{rate}"] = recorded["paced_cpu_share"]
    short = delta_bench.run(num_trajectories, duration_s, completion_len=_SHORT_LEN)
    for key in _RATES:
        row |= {f"recorded_{key}": recorded[key], f"short_{key}": short[key]}
    row |= worker_bench.run(_NUM_WORKERS, duration_s)
    finished = ledger_bench.run(_LEDGER_RATIO * num_trajectories)
    row["trajectories_per_s"] = finished["trajectories_per_s"]
    for key in ("blocked_max_ms", "paced_blocked_max_ms", "idle_blocked_max_ms"):
        row[f"ledger_{key}"] = finished[key]
    row |= update_gap.run(_NUM_UPDATES, "abort")
    kept = update_gap.run(_NUM_UPDATES, "keep")
    row["update_gap_keep_ms"] = kept["update_gap_ms"]
    return row


if __name__ == "__main__":
    sys.exit(main())
