"""What it costs to ask a job for its state, which `umbra top`, `umbra dash` and Prometheus do.

One supervisor with echo engines that serve and have nothing to do. Printed as JSON:

- `answer_ms_p50`, `answer_ms_max`: of `Supervisor.job_state`, asked once a second, at a rank
- `rest_core_share`: of one core, that supervisor and engines use while nobody asks
- `asked_core_share`: the same while somebody asks once a second, of which the supervisor's part is
  `asked_supervisor_core_share`

    python tests/bench/job_state.py [--engines 64] [--seconds 20]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from bench_hardware import describe_hardware
from bench_options import positive

from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.process.descendants import process_stat
from umbra.runtime.session import Session, SessionConfig

START_LIMIT_S = 600.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Time that the process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def core_shares(pids: list[int], begun: list[float], begun_at: float) -> list[float]:
    passed_s = time.monotonic() - begun_at
    return [(cpu_s(pid) - before) / passed_s for pid, before in zip(pids, begun, strict=True)]


def measure(session: Session, seconds: int) -> dict[str, float]:
    rows = session.supervisor_call("list_actors")
    supervisor = process_stat(int(rows[0]["pid"]))
    assert supervisor is not None
    pids = [supervisor.parent_pid, *(int(row["pid"]) for row in rows)]
    begun, begun_at = list(map(cpu_s, pids)), time.monotonic()
    time.sleep(seconds)
    rest = core_shares(pids, begun, begun_at)
    answers_ms: list[float] = []
    begun, begun_at = list(map(cpu_s, pids)), time.monotonic()
    for idx in range(seconds):
        time.sleep(max(0.0, begun_at + idx - time.monotonic()))
        asked = time.perf_counter()
        state = session.supervisor_call("job_state")
        answers_ms.append((time.perf_counter() - asked) * 1000)
        assert all(engine["running"] == 0 for engine in state["pools"][0]["engines"])
    time.sleep(max(0.0, begun_at + seconds - time.monotonic()))
    asked = core_shares(pids, begun, begun_at)
    return {
        "answer_ms_p50": statistics.median(answers_ms),
        "answer_ms_max": max(answers_ms),
        "rest_core_share": sum(rest),
        "asked_core_share": sum(asked),
        "asked_supervisor_core_share": asked[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engines", type=positive, default=64)
    parser.add_argument("--seconds", type=positive, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as name:
        config = SessionConfig(run_dir=Path(name))
        with Session.from_torchrun(config, on_note=lambda text: None) as session:
            session.create_pool(
                PoolSpec(
                    name="policy",
                    engine="umbra.engines.echo.echo_engine:EchoEngine",
                    count=given.engines,
                    mode="standalone",
                    load_weights=True,
                    start_timeout_s=START_LIMIT_S,
                )
            )
            found = measure(session, given.seconds)
    result = {"engines": given.engines, **{key: round(value, 4) for key, value in found.items()}}
    print(json.dumps({"hardware": describe_hardware(), **result}))


if __name__ == "__main__":
    main()
