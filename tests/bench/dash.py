"""What `umbra dash` costs, and how fast it answers, while a large run goes on.

A job of 64 echo engines with a supervisor of its own, and a run directory with 102,400 samples of
256 tokens and the metrics of 2,000 steps, to both of which a step of 1,024 samples is added every
five seconds. One page asks as the real one does, every two seconds, and each time also for the
samples of a step and for the text of one. Printed as JSON:

- `ready_s`: from the start of the command to its first answer; `indexed_s` to that about samples
- `core_share`: CPU time of the command after that, divided by the time
- `p50_ms`, `p99_ms`, `max_ms` of each kind of answer
- `resident_mib` of the command at the end

    python tests/bench/dash.py [--engines 64] [--samples 102400] [--seconds 60]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import ledger_bench
import numpy as np
import torch
from bench_hardware import describe_hardware
from bench_options import positive
from bench_run_files import metrics_of_a_step, write_run_files
from dash_client import TIMEOUT_S, ask, serving

from umbra.runtime.collective import SessionSync
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.process.child_process import resident_nbytes
from umbra.runtime.rollout.ledger.ledger_events import Event, Leased, Version, encode_batches
from umbra.runtime.rollout.ledger.ledger_history import ledger_folder
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog
from umbra.runtime.session import Session, SessionConfig
from umbra.runtime.weights.weight_publisher import WeightPublisher

STEP_SAMPLES: Final = 1024
NUM_ROWS: Final = 2000
STEP_S: Final = 5.0
POLL_S: Final = 2.0


class GrowingRun:
    """The files of a run, to which steps are added."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._metrics = run_dir / "metrics.jsonl"
        self._num_rows = 0
        self._num_samples = 0
        self._log = LedgerLog.open(ledger_folder(run_dir, "bench"), "bench")
        self._write(Version(0, 0))
        ids = (f"prompt{uid}" for uid in range(0, 10**6, 8))
        write_run_files(run_dir, ids, num_words=ledger_bench.TICK_SAMPLES * 256)

    def add_samples(self) -> None:
        """A step's samples, from admission to the lease."""
        step = self._num_samples // STEP_SAMPLES
        uids = np.arange(self._num_samples, self._num_samples + STEP_SAMPLES, dtype=np.int64)
        for first in range(self._num_samples, int(uids[-1]), ledger_bench.TICK_SAMPLES):
            for events in ledger_bench.trajectories(first):
                self._write(*events)
        self._write(Leased(step, uids), Version(step + 1, step + 1))
        self._num_samples += STEP_SAMPLES

    def add_row(self) -> None:
        """A step's metrics."""
        self._num_rows += 1
        row = metrics_of_a_step(self._num_rows) | {"time": time.time(), "time/step_s": STEP_S}
        with self._metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def grow(self, ended: threading.Event) -> None:
        while not ended.wait(STEP_S):
            self.add_samples()
            self.add_row()

    def _write(self, *events: Event) -> None:
        self._log.write(encode_batches(time.time(), events))

    def close(self) -> None:
        self._log.close()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(run_dir: Path, num_steps: int, duration_s: float) -> dict[str, Any]:
    began = time.perf_counter()
    times: defaultdict[str, list[float]] = defaultdict(list)
    with serving(run_dir) as (pid, address):
        _, state = ask(address, "/api/state")
        ready_s = time.perf_counter() - began
        _, found = ask(address, "/api/samples?step=1")
        sample_id = found["samples"][0]["sample_id"]
        ask(address, f"/api/sample/{sample_id}")  # opens the tokenizer and the file of prompts
        indexed_s = time.perf_counter() - began
        times["metrics of all steps"].append(ask(address, "/api/metrics?from=0")[0])
        started, used_s = time.perf_counter(), cpu_s(pid)
        while time.perf_counter() - started < duration_s:
            paths = {
                "state": "/api/state",
                "new metrics": f"/api/metrics?from={NUM_ROWS}",
                "events": "/api/events?from=0",
                "samples of a step": f"/api/samples?step={random.randint(1, num_steps)}",
                "best samples": "/api/samples?order=best",
            }
            for name, path in paths.items():
                took_s, answer = ask(address, path)
                times[name].append(took_s)
                if name == "samples of a step":
                    sample_id = answer["samples"][0]["sample_id"]
            times["text of a sample"].append(ask(address, f"/api/sample/{sample_id}")[0])
            time.sleep(POLL_S)
        elapsed_s = time.perf_counter() - started
        share = (cpu_s(pid) - used_s) / elapsed_s
        engines = [engine for pool in state["job"]["pools"] for engine in pool["engines"]]
        return {
            "engines": len(engines),
            "ready_s": round(ready_s, 2),
            "indexed_s": round(indexed_s, 2),
            "core_share": round(share, 4),
            "resident_mib": round(resident_nbytes(pid) / 2**20),
            **{name: _quantiles(values) for name, values in times.items()},
        }


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    found = {"p50_ms": statistics.median(ordered), "p99_ms": p99, "max_ms": ordered[-1]}
    return {name: round(value * 1e3, 1) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engines", type=positive, default=64)
    parser.add_argument("--samples", type=positive, default=102_400)
    parser.add_argument("--seconds", type=positive, default=60)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as name:
        config = SessionConfig(run_dir=Path(name))
        with Session.from_torchrun(config, on_note=lambda text: None) as session:
            files = GrowingRun(Path(name))
            num_steps = max(1, given.samples // STEP_SAMPLES)
            for _ in range(num_steps):
                files.add_samples()
            for _ in range(NUM_ROWS):
                files.add_row()
            session.create_pool(
                PoolSpec(
                    name="policy",
                    count=given.engines,
                    mode="standalone",
                    engine="umbra.engines.echo.echo_engine:EchoEngine",
                    kwargs={"vocab_size": 64},
                )
            )
            publisher = WeightPublisher(SessionSync(session), 0, 1, {"w": torch.zeros(10)})
            publisher.publish("policy", 0, TIMEOUT_S)
            ended = threading.Event()
            growing = threading.Thread(target=files.grow, args=(ended,))
            growing.start()
            facts = measure(Path(name), num_steps, given.seconds)
            ended.set()
            growing.join()
            publisher.close()
            files.close()
    result = {"bench": "dash", "hardware": describe_hardware(), "samples": given.samples, **facts}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
