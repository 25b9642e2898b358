"""umbra's supervisor alone, started through its guardian as a rank starts it."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from system_report import Task, run_program

from umbra.runtime.cluster.guardian_process import GuardianProcess, start_guardian
from umbra.runtime.cluster.socket_dir import SocketDir
from umbra.runtime.process.child_process import resident_nbytes
from umbra.runtime.process.descendants import child_pids
from umbra.runtime.supervisor_host import SupervisorConfig

_TIMEOUT_S = 20.0
_LOG_LEVEL = 20


async def measure(task: Task) -> dict[str, Any]:
    del task
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as folder:
        start = time.perf_counter()
        with _start_supervisor(Path(folder)) as guardian:
            guardian.wait_ready(_TIMEOUT_S)
            ready_s = time.perf_counter() - start
            (supervisor_pid,) = child_pids(guardian.pid)
            facts: dict[str, Any] = {
                "ready_s": round(ready_s, 4),
                "supervisor_resident_mb": round(resident_nbytes(supervisor_pid) / 1e6, 1),
                "guardian_resident_mb": round(resident_nbytes(guardian.pid) / 1e6, 1),
            }
            os.kill(guardian.pid, signal.SIGTERM)
            guardian.wait(_TIMEOUT_S)
    return facts


def _start_supervisor(folder: Path) -> GuardianProcess:
    sockets = SocketDir.create("bench", "bench", folder)
    config = SupervisorConfig(
        node_id="bench",
        log_dir=str(folder / "logs"),
        run_dir=str(folder),
        is_lead=True,
        socket_dir=str(sockets.path),
        tcp_host="",
        secret_file="",
        log_level=_LOG_LEVEL,
    )
    owner_pidfd = os.pidfd_open(os.getpid())
    try:
        return start_guardian(
            [sys.executable, "-m", "umbra.runtime.supervisor_host"],
            config=config.to_json(),
            socket_dir=sockets,
            log_path=folder / "supervisor.log",
            grace_s=2.0,
            owner_pidfd=owner_pidfd,
        )
    finally:
        os.close(owner_pidfd)


if __name__ == "__main__":
    run_program(measure)
