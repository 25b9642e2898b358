"""The timeline of a real run in which an engine is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from trace_event_format import read_timeline, spans_of
from whole_runs import start_run

from umbra.runtime.cli.umbra_command import main

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_a_run_with_a_killed_engine_has_a_timeline_of_all_processes(folder: Path) -> None:
    with start_run(folder, "train.steps=40", "run.profile_steps=[3]") as run:
        run.wait_for_step(2)
        os.kill(run.pid_of("policy-0"), signal.SIGKILL)
        run.wait_for_restart("policy-0")
        ended = run.wait()
    assert ended.status == 0, ended.output
    profiles = {f"torch.{rank}.step-3.json.gz" for rank in (0, 1)}
    assert profiles <= {path.name for path in (run.run_dir / "trace").iterdir()}
    path = folder / "all.json.gz"

    assert main(["trace", str(run.run_dir), "-o", str(path)]) == 0

    events = read_timeline(path)
    rows = {
        *(
            ("rank-0", name)
            for name in ("step", "sync", "wait for the batch", "train", "optimizer")
        ),
        *(("rank-1", name) for name in ("step", "checkpoint")),
        *(("supervisor", name) for name in ("start", "transferring", "load", "commit_update")),
        *(("policy-0", name) for name in ("load weights", "verify", "resume")),
        *(("rollouts", name) for name in ("group", "batch")),
        ("worker-0", "reward"),
    }
    assert {row for row in rows if not spans_of(events, *row)} == set()
    steps = spans_of(events, "rank-0", "step")
    assert [step["args"]["step"] for step in steps] == list(range(1, 41))
    starts = spans_of(events, "supervisor", "start")
    assert [s["args"]["incarnation"] for s in starts if s["tid"] == starts[0]["tid"]] != []
    killed = [e for e in events if e["name"] == "end" and "SIGKILL" in e["args"]["how"]]
    assert ["policy-0#1" in event["args"]["how"] for event in killed] == [True]
    engine_loads = {
        load["args"]["version"] for load in spans_of(events, "policy-0", "load weights")
    }
    syncs = {s["args"]["version"] for s in spans_of(events, "rank-0", "sync")}
    assert engine_loads <= syncs
    assert max(engine_loads) == max(syncs)
