"""What tracing costs a run: the quickstart with many short steps, with `run.trace` and without it.

    python tests/bench/trace_cost.py [--rounds 9] [--steps 150] [--json]

The cost is processor time of all processes, user and system, because other work on the machine
changes it less than the time on the clock. A round runs it with a trace and twice without, in an
order that rotates, and the result is the median over the rounds' differences. The difference of the
two runs without one is the noise. A second number has none: the events of a step times the cost of
one, as a share of the step.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from bench_hardware import describe_hardware
from bench_options import options_parser, positive
from bench_rounds import show_progress

from umbra.runtime.process.prctl import become_subreaper
from umbra.runtime.tracing.spans import span
from umbra.runtime.tracing.trace_files import TraceFiles
from umbra.runtime.tracing.trace_writer import recording
from umbra.trainer.reporting.metrics_log import read_metrics

_CONFIG: Final = Path(__file__).resolve().parents[2] / "launch/configs/quickstart.toml"
_KINDS: Final = ("plain", "traced", "plain again")
_RUN_LIMIT_S: Final = 600.0
_NUM_EVENTS: Final = 10_000
"""Below the length of the queue, so that all are written."""


def main() -> None:
    """Entry point."""
    parser = options_parser(__doc__, rounds=9)
    parser.add_argument("--steps", type=positive, default=150, help="steps of a run (default 150)")
    arguments = parser.parse_args()
    become_subreaper()  # so that what the runs leave is waited for, and counted
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as name:
        folder = Path(name)
        _run(folder, ["-m", "umbra.trainer.quickstart", "runs/quickstart-assets"])
        facts = measure(folder, arguments.rounds, arguments.steps)
    facts = {"bench": "trace_cost", "hardware": describe_hardware(), **facts}
    if arguments.json:
        print(json.dumps(facts))
    else:
        for key, value in facts.items():
            print(f"{key}: {value}")


def measure(folder: Path, rounds: int, num_steps: int) -> dict[str, object]:
    """Runs everything; shares are of the processor time of a run without a trace."""
    seconds: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for idx in range(rounds):
        turn = idx % len(_KINDS)
        for kind in _KINDS[turn:] + _KINDS[:turn]:
            show_progress(f"round {idx + 1} of {rounds}, {kind}")
            seconds[kind].append(_train(folder, num_steps, is_traced=kind == "traced"))
    run_dir = folder / "traced"
    files = TraceFiles(run_dir)
    window = files.find_steps(2, num_steps - 1)  # the first one compiles, the last one exports
    num_events = sum(1 for _ in files.events(window)) / (num_steps - 2)
    rows = read_metrics(run_dir / "metrics.jsonl")[1:-1]
    event_s = _event_s(folder / "events")
    step_s = statistics.median(row["time/step_s"] for row in rows)
    return {
        "rounds": rounds,
        "steps": num_steps,
        "cpu_s": {kind: round(statistics.median(runs), 3) for kind, runs in seconds.items()},
        "traced_shares": _shares(seconds["traced"], seconds["plain"]),
        "plain_again_shares": _shares(seconds["plain again"], seconds["plain"]),
        "events_per_step": round(num_events, 1),
        "nbytes_per_step": round(_size(run_dir / "trace") / num_steps),
        "event_us": round(event_s * 1e6, 3),
        "step_ms": round(step_s * 1e3, 2),
        "event_share": round(num_events * event_s / step_s, 6),
    }


def _shares(some: list[float], others: list[float]) -> dict[str, float]:
    """How much more they took than the others of their rounds."""
    shares = [one / other - 1 for one, other in zip(some, others, strict=True)]
    found = {"median": statistics.median(shares), "min": min(shares), "max": max(shares)}
    return {name: round(share, 4) for name, share in found.items()}


def _train(folder: Path, num_steps: int, *, is_traced: bool) -> float:
    """Processor seconds of a run."""
    name = "traced" if is_traced else "plain"
    shutil.rmtree(folder / name, ignore_errors=True)
    settings = [
        f"run.dir={name}",
        f"run.trace={str(is_traced).lower()}",
        f"train.steps={num_steps}",
        "train.eval_every=0",
        "train.export=false",
        "run.loggers=[]",
    ]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return _run(folder, [*launcher, "-m", "umbra.trainer", str(_CONFIG), *settings])


def _run(folder: Path, arguments: list[str]) -> float:
    """Runs a Python program to the end of all its processes; returns their processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_RUN_LIMIT_S,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    while True:
        try:
            os.wait()  # guardian and supervisor, which waited for the actors
        except ChildProcessError:
            break
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _event_s(folder: Path) -> float:
    """Processor seconds from a span to its line in the file, without what it takes anyway."""
    began = time.process_time()
    with recording(str(folder), "node", "process"):
        _make_spans()
    recorded_s = time.process_time() - began
    began = time.process_time()
    _make_spans()
    return (recorded_s - (time.process_time() - began)) / _NUM_EVENTS


def _make_spans() -> None:
    for idx in range(_NUM_EVENTS):
        with span("train", step=idx):
            pass


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.jsonl"))


if __name__ == "__main__":
    main()
