"""Kills the whole quickstart at random moments and resumes it each time; used by `make kills`.

    python tests/faults/kill_quickstart.py ASSETS --run-dir runs/kills [--long 5000]

There are two jobs, each killed N times. "hybrid" trains on-policy in float64 and is compared step
by step and token for token with an undisturbed run. "standalone" trains on data of up to two steps
ago. `--long STEPS` trains a single job of small steps instead, and kills its manager, an engine and
all of its processes in turn. The history of each job, from its ranks' own records, is compared with
the ledger. RUN_DIR/summary.json has the results.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
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
from whole_runs import Run

from umbra.runtime.process.child_process import process_nbytes
from umbra.trainer.reporting.metrics_loggers import read_metrics

_CONFIG: Final = Path(__file__).parents[2] / "launch/configs/quickstart.toml"
_GROUP_SIZE: Final = 8  # the quickstart's
_MAX_STALENESS: Final = 2
_MODES: Final[dict[str, tuple[str, ...]]] = {
    "hybrid": ("model.dtype=float64",),
    "standalone": ("pool.mode=standalone", f"rollout.max_staleness={_MAX_STALENESS}"),
}
_LONG: Final = ("rollout.groups_per_step=8", "train.checkpoint_every=50")
_VICTIMS: Final = ("rollouts", "policy-1", "all")
_LONG_LIMIT_S: Final = 10_800.0
_POLL_S: Final = 1.0
_COMPARED_STEPS: Final = 500  # at the beginning and at the end of a long run


def main(argv: Sequence[str] | None = None) -> None:
    """Raises an AssertionError with what was lost, repeated or different."""
    arguments = _parser().parse_args(argv)
    print(f"kills: seed {arguments.seed}", flush=True)
    shutil.rmtree(arguments.run_dir, ignore_errors=True)
    summary: dict[str, Any] = {"seed": arguments.seed, "steps": arguments.steps}
    if arguments.long:
        arguments.steps = summary["steps"] = arguments.long
        settings = [*_MODES["standalone"], *_LONG]
        _, summary["long"] = _train("long", settings, arguments, _kill_in_turn)
    else:
        undisturbed, _ = _train("hybrid undisturbed", _MODES["hybrid"], arguments)
        for name, settings in _MODES.items():
            history, summary[name] = _train(name, settings, arguments, _kill_all)
            if name == "hybrid":
                check_same(history, undisturbed)
            print(f"kills: {name}: {summary[name]}", flush=True)
    path = arguments.run_dir / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n")
    print(f"kills: every sample trained exactly once; see {path}")


def _train(
    name: str,
    settings: Sequence[str],
    arguments: argparse.Namespace,
    disturb: Callable[[KilledJob, argparse.Namespace, random.Random], dict[str, Any]] | None = None,
) -> tuple[History, dict[str, Any]]:
    """Runs one job to its end; returns its checked history, and its summary. `disturb` runs and
    kills all incarnations but the last, and adds to the summary."""
    rng = random.Random(f"{arguments.seed} {name}")
    folder = (arguments.run_dir / name).absolute()
    folder.mkdir(parents=True)
    shutil.copy(_CONFIG, folder / "config.toml")
    begun = time.monotonic()
    with KilledJob(folder, [*_common(arguments), *settings], rng=rng, is_forked=False) as job:
        facts = disturb(job, arguments, rng) if disturb else {}
        with job.begin() as run:
            ended = run.wait(_LONG_LIMIT_S)
        assert ended.status == 0, ended.output
        history = job.history()
    assert sorted(history) == list(range(arguments.steps))
    check_exactly_once(history)
    check_order(history, job.run_dir, group_size=_GROUP_SIZE)
    check_ledger(history, job.run_dir)
    check_metrics(history, job.run_dir)
    ages = check_ages(history, job.run_dir, 0 if name.startswith("hybrid") else _MAX_STALENESS)
    return history, facts | {
        **_measured(job.run_dir),
        "samples": sum(map(len, history.values())),
        "tokens_by_age": {str(age): ages[age] for age in sorted(ages)},
        "wall_s": round(time.monotonic() - begun, 1),
    }


def _kill_all(job: KilledJob, arguments: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Kills every process at random moments."""
    for number, kill in enumerate(plan_kills(arguments.kills, arguments.steps, rng), 1):
        with job.begin() as run:
            job.kill(run, kill)
        print(f"kills: {number} of {arguments.kills}: {kill}", flush=True)
    return {"kills": job.num_kills, "kills_during_a_checkpoint": job.num_torn}


def _kill_in_turn(
    job: KilledJob, arguments: argparse.Namespace, rng: random.Random
) -> dict[str, Any]:
    """Kills the manager, an engine and every process in turn, at random steps. Measures seconds
    until the next step, and the manager's memory."""
    num_kills = arguments.kills - arguments.kills % len(_VICTIMS)
    steps = iter(sorted(rng.sample(range(1, arguments.steps - 1), num_kills)))
    back_s: dict[str, list[float]] = {victim: [] for victim in _VICTIMS}
    manager_mb: list[float] = []
    for _ in range(num_kills // len(_VICTIMS)):
        begun = time.monotonic()
        with job.begin() as run:
            job.wait_for_batch(run, 0)
            back_s["all"].append(round(time.monotonic() - begun, 1))
            for victim in _VICTIMS:
                _wait_for_step(run, next(steps))
                num_steps, begun = run.num_steps(), time.monotonic()
                print(f"kills: {victim} after {num_steps} steps", flush=True)
                manager_mb.append(round(process_nbytes(run.pid_of("rollouts")) / 1e6, 1))
                if victim == "all":
                    run.kill_all(rng)
                else:
                    os.kill(run.pid_of(victim), signal.SIGKILL)
                    _wait_for_step(run, num_steps + 2)  # the next one may have its batch
                    back_s[victim].append(round(time.monotonic() - begun, 1))
    return {"kills": num_kills, "back_s": back_s, "manager_mb": manager_mb}


def _wait_for_step(run: Run, step: int) -> None:
    run.wait_for(f"step {step}", lambda: run.num_steps() >= step or None, _LONG_LIMIT_S, _POLL_S)


def _measured(run_dir: Path) -> dict[str, Any]:
    """Seconds of the first and the last steps, by the median, and the size of the ledger."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    took_s = [row["time/step_s"] for row in rows if "time/step_s" in row]
    num = min(_COMPARED_STEPS, len(took_s) // 2)
    nbytes = sum(path.stat().st_size for path in (run_dir / "ledger/rollouts").iterdir())
    return {
        "first_steps_s": round(statistics.median(took_s[:num]), 4),
        "last_steps_s": round(statistics.median(took_s[-num:]), 4),
        "ledger_mb": round(nbytes / 1e6, 1),
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
    parser.add_argument(
        "--long", type=int, metavar="STEPS", help="train one job of so many steps instead"
    )
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of the moments")
    return parser


if __name__ == "__main__":
    main()
