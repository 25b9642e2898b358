"""`umbra dump` shows what a job's processes are doing; `umbra trace` writes a timeline.

The supervisor of rank 0's node makes the bundle. If it does not answer, and runs on this machine,
this command reports on the processes of this machine from outside.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import time
from pathlib import Path
from typing import Final

from umbra.runtime.cli.stop_command import (
    call_supervisor,
    find_job,
    has_ended,
    request_job,
    wait_until,
)
from umbra.runtime.cluster.run_requests import JobRequest, SupervisorAddress
from umbra.runtime.errors import ActorNotFound, ConfigError
from umbra.runtime.process.descendants import process_stat
from umbra.runtime.reports.hang_bundle import bundle_path, read_summary, write_bundle
from umbra.runtime.reports.process_report import report_processes
from umbra.runtime.supervisor.live_job import is_reachable, run_interruptibly
from umbra.runtime.terminal_text import escape_unprintable
from umbra.runtime.tracing.trace_files import TraceFiles, trace_json, write_trace

_BUNDLE_LIMIT_S: Final = 30.0
"""Deadline of the bundle's file, which a network file system may show late."""

_FORMATS: Final = (".json", ".json.gz")


def run(arguments: argparse.Namespace) -> int:
    run_dir = Path(arguments.run_dir)
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is not a directory: give a job's run.dir")
    try:
        path = _make_bundle(run_dir)
        summary = read_summary(path)
    except OSError as error:
        raise ConfigError(f"cannot use {run_dir}: {error}") from error
    print(escape_unprintable(summary))
    print(f"all of it, with stacks and logs: {path}")
    return 0


def _make_bundle(run_dir: Path) -> Path:
    notice, address = find_job(run_dir)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    path = bundle_path(run_dir, name)
    request = JobRequest(job=address.job, kind="dump", bundle=name)
    if not is_reachable(address):
        request_job(notice, address, request)
    elif not run_interruptibly(call_supervisor(address, request)):
        files = report_processes(_roots(address), run_dir / "logs")
        write_bundle(path, "the supervisor does not answer", None, {"node-0": files})
        return path
    wait_until(
        lambda: path.exists() or has_ended(notice, address),
        time.monotonic() + _BUNDLE_LIMIT_S,
        f"{path} was written",
    )
    if not path.exists():
        raise ActorNotFound(f"the job in {run_dir} ended before {path} was written")
    return path


def _roots(address: SupervisorAddress) -> dict[str, int]:
    """The supervisor, and the processes above it up to torchrun, whose other children are ranks."""
    roots: dict[str, int] = {}
    pid = address.pid
    for name in ("supervisor", "guardian", "rank", "torchrun"):
        stat = process_stat(pid)
        if stat is None or (name == "torchrun" and not _is_torchrun(pid)):
            break
        roots[name], pid = pid, stat.parent_pid
    return roots


def _is_torchrun(pid: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"torchrun" in command or b"torch.distributed.run" in command
    return False


def run_trace(arguments: argparse.Namespace) -> int:
    run_dir, output = Path(arguments.run_dir), arguments.output
    if output and not output.endswith(_FORMATS):
        raise ConfigError(f"-o {output}: end the name with {' or '.join(_FORMATS)}")
    try:
        files = TraceFiles(run_dir)
        events, name = files.events(), "all"
        if arguments.steps:
            first, last = arguments.steps
            events = files.events(files.find_steps(first, last))
            name = f"steps-{first}-{last}"
        path = Path(output or run_dir / "trace" / f"{name}.json.gz")
        write_trace(path, trace_json(events))
    except OSError as error:
        raise ConfigError(f"cannot write a timeline of {run_dir}: {error}") from error
    print(f"{path}: open it at https://ui.perfetto.dev")
    return 0
