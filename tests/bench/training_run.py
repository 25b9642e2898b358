"""A whole training run of a Qwen3 shape with weights from a seed, and a reward that is random.

    python tests/bench/training_run.py --shape 8B --ranks 1 --steps 6 [--folder DIR]
        [--kill policy-0] [--metrics FILE] [--trace FILE] [section.key=value ...]

The model is made once in DIR (on a GPU if there is one), and runs are in folders below it. `--kill`
kills an actor after a quarter of the run. `--metrics` keeps the metrics of each step, `--trace` the
timeline that `umbra trace` makes. Prints what the run prints, and then, also of a run that is ended
before its last step, a JSON object: medians, smallest and largest values from the third step on of
times, tokens/s and memory. `time/other_s` is the part that is neither generation nor training. With
`--trace`, they include tokens/s of an engine, and how long each was interrupted by an update.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from bench_report import torchrun
from qwen3_shapes import SHAPES, save_model

from umbra.runtime.testing.factories import make_tiny_model
from umbra.runtime.tracing.trace_files import TraceFiles, trace_json, write_trace
from umbra.trainer.reporting.metrics_loggers import read_metrics

CONFIG: Final = """
run = {{dir = "{}"}}
model = {{path = "{}", dtype = "bfloat16"}}
data = {{train = "{}"}}
reward = {{function = "random_reward:reward", python_path = ["{}"]}}
rollout = {{groups_per_step = 16, group_size = 8, max_new_tokens = 256}}
pool = {{max_context_len = 1024, max_num_seqs = 128}}
train = {{steps = {}, learning_rate = 1e-6, export = false}}
"""
REWARD: Final = """
import random

def reward(prompts, completions, **columns):
    return [random.random() for _ in completions]
"""
FIRST_STEP: Final = 3
MEASURED: Final = (
    "time/", "memory/", "sync/", "rollout/tokens_per_s", "rollout/refilled_tokens",
    "rollout/engine", "rollout/staleness_mean", "train/behaviour_kl",
)  # fmt: skip


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    folder.mkdir(parents=True)
    AutoTokenizer.from_pretrained(make_tiny_model(folder.parent)).save_pretrained(folder)
    save_model(folder, shape, "bfloat16", eos_token_id=1, pad_token_id=0, bos_token_id=None)


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median, smallest and largest value of each measure, from the third step on."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        if row["step"] >= FIRST_STEP:
            row["time/other_s"] = row["time/step_s"] - row["time/rollout_s"] - row["time/train_s"]
            for name, value in row.items():
                if name.startswith(MEASURED):
                    columns.setdefault(name, []).append(value)
    return {name: spread(values) for name, values in columns.items()}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measures_of_engines(trace: TraceFiles, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The tokens/s of an engine in the same steps, and the seconds of each engine's updates from
    the beginning of its pause to its first step under the new weights."""
    updates: dict[str, list[float]] = {}
    paused_at: dict[str, int] = {}
    for process, event in sorted(trace.events(), key=lambda item: item[1].start_ns):
        if event.name == "pause":
            paused_at[process.name] = event.start_ns
        elif event.name == "resume" and process.name in paused_at:
            end_ns = event.start_ns + event.duration_ns
            interrupted_s = (end_ns - paused_at.pop(process.name)) / 1e9
            updates.setdefault(process.name, []).append(interrupted_s)
    speeds = [row["rollout/tokens_per_s"] for row in rows if row["step"] >= FIRST_STEP]
    return {
        "tokens_per_s of an engine": spread([speed / len(updates) for speed in speeds]),
        **{f"update_s of {name}": spread(found[1:]) for name, found in updates.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6B")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="kept; without it, a temporary one is made")
    parser.add_argument("--kill", metavar="ACTOR", help="such as policy-0")
    parser.add_argument("--metrics", type=Path, help="a copy of the run's metrics.jsonl")
    parser.add_argument("--trace", type=Path, help="the run's timeline, compressed")
    parser.add_argument("settings", nargs="*", help="section.key=value")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory(prefix="umbra-training-") as temporary:
        return run(options, options.folder or Path(temporary))


def run(options: argparse.Namespace, folder: Path) -> int:
    """Returns the exit status of the run."""
    model, prompts = folder / options.shape, folder / "prompts.jsonl"
    if not (model / "config.json").exists():
        # In a process of its own, whose memory on the GPU is free when the run begins.
        arguments = (model, SHAPES[options.shape])
        writer = get_context("spawn").Process(target=write_model, args=arguments)
        writer.start()
        writer.join()
        rows = ({"prompt": f"Question {i}: how much is {i} times 7? "} for i in range(512))
        prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run_dir = folder / f"run-{time.strftime('%H%M%S')}"
    config = folder / "config.toml"
    config.write_text(CONFIG.format(run_dir, model, prompts, folder, options.steps))
    (folder / "random_reward.py").write_text(REWARD)
    program = ("-m", "umbra.trainer", str(config), *options.settings)
    command = torchrun(*program, num_ranks=options.ranks)
    metrics = run_dir / "metrics.jsonl"
    with subprocess.Popen(command, env=dict(os.environ, PYTHONUNBUFFERED="1")) as job:
        if options.kill:
            while job.poll() is None and num_steps(metrics) < options.steps // 4:
                time.sleep(0.1)
            os.kill(pid_of(options.kill, run_dir), signal.SIGKILL)
        try:
            status = job.wait()
        except KeyboardInterrupt:  # the job has it, too
            status = 128 + signal.SIGINT
        report(options, run_dir)
    return status


def report(options: argparse.Namespace, run_dir: Path) -> None:
    """Prints the measures of the steps that there are, also of a run that was ended."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists():
        return
    if options.metrics:
        shutil.copyfile(metrics, options.metrics)
    rows = read_metrics(metrics)
    trace = TraceFiles(run_dir)
    if options.trace:
        write_trace(options.trace, trace_json(trace.events()))
    if rows[-1]["step"] >= FIRST_STEP:
        engines = measures_of_engines(trace, rows) if options.trace else {}
        print(json.dumps(summary(rows) | engines), flush=True)


def num_steps(metrics: Path) -> int:
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def pid_of(actor: str, run_dir: Path) -> int:
    """The process of a run's actor, whose command line has its name and its log."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_text()
            if f"{actor}#" in command and str(run_dir) in command:
                return int(process.name)
    raise SystemExit(f"no process of {actor!r}")


if __name__ == "__main__":
    sys.exit(main())
