"""The drill: engines are killed during training, which must reach the same accuracy.

    python tests/faults/drill/drill.py CONFIG [section.key=value ...] [--run-dir runs/drill]
        [--seed N]

Trains twice, with several engines and with a single one. The exit status is 1 if anything is wrong,
and stderr has the problems. RUN_DIR/summary.json has the results.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).parents[2] / "shared"))  # run_traces is there

from drilled_run import DrilledRun, run_drilled

from umbra.runtime.cli.umbra_command import main as run_umbra
from umbra.runtime.errors import UmbraError
from umbra.trainer.reporting.console import Console

_PASSES: Final = {"two-engines": ["pool.count=2"], "one-engine": ["pool.count=1"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every run passed, else 1, with the reasons on stderr."""
    arguments = _parser().parse_intermixed_args(argv)
    # Raises, so that the training is ended, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    print(f"drill: seed {arguments.seed}", flush=True)
    rng = random.Random(arguments.seed)
    runs: list[DrilledRun] = []
    try:
        for name, overrides in _PASSES.items():
            print(f"drill: training with {name.replace('-', ' ')}", flush=True)
            run_dir = arguments.run_dir / name
            settings = [*overrides, *arguments.overrides]
            run = run_drilled(name, arguments.config, settings, run_dir, rng)
            _report(run)
            print(textwrap.indent(_account(run_dir), "    "), flush=True)
            runs.append(run)
    except (UmbraError, subprocess.SubprocessError) as error:
        print(f"drill: failed: {error}", file=sys.stderr)
        return 1
    path = arguments.run_dir / "summary.json"
    path.write_text(json.dumps(summarise(runs, arguments.seed), indent=2) + "\n")
    problems = [problem for run in runs for problem in run.problems(arguments.bar)]
    for problem in problems:
        print(f"drill: {problem}", file=sys.stderr)
    verdict = "failed" if problems else "passed: same bar, nothing left behind"
    print(f"drill: {verdict}; see {path}")
    return 1 if problems else 0


def summarise(runs: Sequence[DrilledRun], seed: int) -> dict[str, Any]:
    """The keys of a run's summary.json: accuracies of the worse run, sums of the others."""
    summaries = [run.summary for run in runs]
    return {
        "accuracy_before": max(summary["accuracy_before"] for summary in summaries),
        "accuracy_after": min(summary["accuracy_after"] for summary in summaries),
        "wall_s": sum(summary["wall_s"] for summary in summaries),
        "steps": sum(summary["steps"] for summary in summaries),
        "engine_restarts": sum(summary["engine_restarts"] for summary in summaries),
        "seed": seed,
        "runs": {run.name: run.summary for run in runs},
    }


def _account(run_dir: Path) -> str:
    """The output of `umbra ledger RUN_DIR`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_umbra(["ledger", str(run_dir)])
    return printed.getvalue().rstrip()


def _report(run: DrilledRun) -> None:
    print(f"drill: what the supervisor logged about {run.kill.engine}:")
    for line in run.log_lines[:3]:
        print(f"    {line}")
    print(
        f"drill: {run.name}: accuracy {run.summary['accuracy_before']:.2f} -> "
        f"{run.summary['accuracy_after']:.2f}, {run.summary['engine_restarts']} restart(s), "
        f"{len(run.leftovers)} leftovers",
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tests/faults/drill/drill.py",
        description="Train while engines are killed, and check that training ends just as well.",
    )
    parser.add_argument("config", type=Path, help="config of the training")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/drill"))
    parser.add_argument("--bar", type=float, default=0.8, help="accuracy to reach (default 0.8)")
    parser.add_argument(
        "--seed", type=int, default=secrets.randbelow(2**31), help="decides the kills"
    )
    return parser


if __name__ == "__main__":
    Console.install()  # `make drill | head` still trains
    sys.exit(main())
