"""Kills the whole quickstart at random moments and resumes it each time; used by `make kills`.

    python tests/faults/kill_quickstart.py ASSETS --run-dir runs/kills

There are two jobs, each killed N times. "hybrid" trains on-policy in float64 and is compared step
by step and token for token with an undisturbed run. "standalone" trains on data of up to two steps
ago. The history of each, from its ranks' own records, is compared with the ledger.
RUN_DIR/summary.json has the results.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).parents[1] / "shared"))  # run_traces is there
sys.path.append(str(Path(__file__).parents[1] / "shared/ledger"))  # ledger_replay is there

from killed_jobs import KilledJob, plan_kills
from trained_history import (
    History,
    check_ages,
    check_exactly_once,
    check_ledger,
    check_metrics,
    check_order,
    check_same,
)

_CONFIG: Final = Path(__file__).parents[2] / "launch/configs/quickstart.toml"
_GROUP_SIZE: Final = 8  # the quickstart's
_MAX_STALENESS: Final = 2
_MODES: Final[dict[str, tuple[str, ...]]] = {
    "hybrid": ("model.dtype=float64",),
    "standalone": ("pool.mode=standalone", f"rollout.max_staleness={_MAX_STALENESS}"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Raises an AssertionError with what was lost, repeated or different."""
    arguments = _parser().parse_args(argv)
    print(f"kills: seed {arguments.seed}", flush=True)
    shutil.rmtree(arguments.run_dir, ignore_errors=True)
    undisturbed, _ = _train("undisturbed", _MODES["hybrid"], 0, arguments)
    summary: dict[str, Any] = {"seed": arguments.seed, "steps": arguments.steps}
    for name, settings in _MODES.items():
        history, summary[name] = _train(name, settings, arguments.kills, arguments)
        if name == "hybrid":
            check_same(history, undisturbed)
        print(f"kills: {name}: {summary[name]}", flush=True)
    path = arguments.run_dir / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n")
    print(f"kills: every sample trained exactly once; see {path}")


def _train(
    name: str, settings: Sequence[str], num_kills: int, arguments: argparse.Namespace
) -> tuple[History, dict[str, Any]]:
    """Runs one job with so many kills; returns its checked history, and its summary."""
    rng = random.Random(f"{arguments.seed} {name}")
    folder = (arguments.run_dir / name).absolute()
    folder.mkdir(parents=True)
    shutil.copy(_CONFIG, folder / "config.toml")
    begun = time.monotonic()
    given = [*_common(arguments), *settings]
    with KilledJob(folder, given, rng=rng, is_forked=False) as job:
        for number, kill in enumerate(plan_kills(num_kills, arguments.steps, rng), 1):
            with job.begin() as run:
                job.kill(run, kill)
            print(f"kills: {name}: {number} of {num_kills}: {kill}", flush=True)
        with job.begin() as run:
            job.finish(run)
        history = job.history()
    assert sorted(history) == list(range(arguments.steps))
    check_exactly_once(history)
    check_order(history, job.run_dir, group_size=_GROUP_SIZE)
    check_ledger(history, job.run_dir)
    check_metrics(history, job.run_dir)
    ages = check_ages(history, job.run_dir, _MAX_STALENESS if name == "standalone" else 0)
    return history, {
        "kills": job.num_kills,
        "kills_during_a_checkpoint": job.num_torn,
        "samples": sum(map(len, history.values())),
        "tokens_by_age": {str(age): ages[age] for age in sorted(ages)},
        "wall_s": round(time.monotonic() - begun, 1),
    }


def _common(arguments: argparse.Namespace) -> list[str]:
    assets = arguments.assets.absolute()
    return [
        "run.dir=run",
        "run.overwrite=false",
        f"model.path={assets}/model",
        f"data.train={assets}/train.jsonl",
        f"data.eval={assets}/eval.jsonl",
        "data.eval_limit=16",
        "train.eval_every=0",
        "train.export=false",
        "train.checkpoint_every=3",
        f"train.steps={arguments.steps}",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Kill and resume the quickstart.")
    parser.add_argument("assets", type=Path, help="model and data of the quickstart")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/kills"))
    parser.add_argument("--kills", type=int, default=15, help="of each job (default 15)")
    parser.add_argument("--steps", type=int, default=60, help="of each job (default 60)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of the moments")
    return parser


if __name__ == "__main__":
    main()
