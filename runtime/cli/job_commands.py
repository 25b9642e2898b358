"""Requests to the job of a run directory: `umbra stop` and `umbra preempt` end it in order, `umbra
drain` takes one of its nodes out, and `umbra dump` shows what its processes are doing.

The request goes to the supervisor's socket. If that is out of reach, on another node or in another
container, the request is left in the run directory, where the supervisor looks once a second. A
bundle of a supervisor that does not answer, and runs here, is made from outside of the processes.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

from umbra.runtime.cluster.run_events import RunEvent, read_events
from umbra.runtime.cluster.run_requests import (
    NOTHING_TO_SAVE,
    JobAnswer,
    JobRequest,
    RunNotice,
    SupervisorAddress,
)
from umbra.runtime.errors import (
    ActorNotFound,
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    MailboxClosed,
    UmbraError,
)
from umbra.runtime.process.descendants import process_stat
from umbra.runtime.reports.hang_bundle import bundle_path, read_summary, write_bundle
from umbra.runtime.reports.job_state import ask_supervisor, is_reachable, run_interruptibly
from umbra.runtime.reports.process_report import report_processes
from umbra.runtime.settings import to_wire
from umbra.runtime.terminal_text import escape_unprintable

_END_LIMIT_S: Final = 120.0
"""Time after the grace time for the job to write results and end its processes. Longer delays
the report of a job that hangs; shorter reports one that only ends slowly."""
_CALL_LIMIT_S: Final = 10.0
_TAKEN_WITHIN_S: Final = 120.0
"""Time until the supervisor sees a request file; network file systems may take a minute."""
_LOOK_INTERVAL_S: Final = 0.25
_BUNDLE_LIMIT_S: Final = 30.0
"""Deadline of a bundle's file, which a network file system may show late."""
NOT_SAVED_STATUS: Final = 3
"""Exit status of `umbra stop` and `umbra preempt` if the job's step in progress was cut."""


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 when the job has ended in order, or has taken the request to drain a node, and
    `NOT_SAVED_STATUS` when it has ended without the checkpoint that was asked for."""
    run_dir = Path(arguments.run_dir)
    try:
        if arguments.command == "drain":
            return _drain(run_dir, arguments.node)
        return _end_job(run_dir, arguments.command, arguments.within)
    except BrokenPipeError:  # of the output, perhaps
        raise
    except OSError as error:
        raise ConfigError(f"cannot use {run_dir}: {error}") from error


def _end_job(run_dir: Path, kind: Literal["stop", "preempt"], grace_s: float) -> int:
    notice, address = _find_job(run_dir)
    num_earlier_events = len(read_events(run_dir))
    deadline = time.monotonic() + grace_s + _END_LIMIT_S
    _request_job(notice, address, JobRequest(job=address.job, kind=kind, grace_s=grace_s))
    _wait_until(
        lambda: _has_ended(notice, address) and not notice.is_locked,
        deadline,
        f"the job in {run_dir} ended",
    )
    if kind == "preempt" and not notice.is_preempted:
        raise UmbraError(f"the job in {run_dir} ended before it could be preempted")
    saved, is_in_order = _what_was_saved(run_dir, read_events(run_dir)[num_earlier_events:])
    print(f"{run_dir}: {'preempted' if kind == 'preempt' else 'stopped'}{saved}")
    return 0 if is_in_order else NOT_SAVED_STATUS


def _what_was_saved(run_dir: Path, events: Sequence[RunEvent]) -> tuple[str, bool]:
    """Text about the checkpoint, and whether the job ended in order, by later events."""
    paths = (path.parent for path in run_dir.glob("checkpoints/*/COMPLETE"))
    newest = max(paths, key=lambda path: (len(path.name), path.name), default=None)
    is_written = any(event.kind == "checkpoint" for event in events)
    failure = next((event.text for event in events if event.kind == "failed"), "")
    if not failure or is_written or NOTHING_TO_SAVE in failure:
        return f"; checkpoint: {newest}" if newest else "; there is no checkpoint yet", True
    left = f"the newest is {newest}" if newest else "there is none"
    return f", but no checkpoint was written ({left}): {failure.splitlines()[0]}", False


def _drain(run_dir: Path, node: str) -> int:
    notice, address = _find_job(run_dir)
    _request_job(notice, address, JobRequest(job=address.job, kind="drain", node=node))
    print(f"{run_dir}: node {node} is asked to leave")
    return 0


def _find_job(run_dir: Path) -> tuple[RunNotice, SupervisorAddress]:
    """Raises ActorNotFound if no job runs in the directory."""
    notice = RunNotice(run_dir)
    address = notice.address()
    if address is None:
        raise ActorNotFound(f"no job is running in {run_dir}")
    return notice, address


def _request_job(notice: RunNotice, address: SupervisorAddress, request: JobRequest) -> None:
    """Returns when the job has taken the request, or has ended. Raises ActorNotFound if the request
    cannot be fulfilled, or the job was killed."""
    if is_reachable(address) and run_interruptibly(_call_supervisor(address, request)):
        return
    if _has_ended(notice, address):
        return
    notice.leave_request(request)
    answer: JobAnswer | None = None

    def is_taken() -> bool:
        nonlocal answer
        answer = notice.take_answer(request)
        return answer is not None or _has_ended(notice, address)

    _wait_until(
        is_taken,
        time.monotonic() + _TAKEN_WITHIN_S,
        f"its supervisor on {address.node_id} took the request; was the job killed?",
    )
    if answer is not None and answer.refusal:
        raise ActorNotFound(answer.refusal)


def _has_ended(notice: RunNotice, address: SupervisorAddress) -> bool:
    """Whether the job has ended in order. Raises ActorNotFound if it was killed."""
    current = notice.address()
    if current is None or current.job != address.job:
        return True
    is_reachable(current)  # raises if the job has been killed since
    return False


async def _call_supervisor(address: SupervisorAddress, request: JobRequest) -> bool:
    """False if the supervisor did not answer."""
    try:
        await ask_supervisor(address, "request", to_wire(request), timeout_s=_CALL_LIMIT_S)
    except (ConnectionLost, DeadlineExceeded, MailboxClosed):
        return False
    return True


def _wait_until(look: Callable[[], bool], deadline: float, what: str) -> None:
    while not look():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"not within the deadline: {what}")
        time.sleep(_LOOK_INTERVAL_S)


def dump(arguments: argparse.Namespace) -> int:
    run_dir = Path(arguments.run_dir)
    try:
        path = _make_bundle(run_dir)
        summary = read_summary(path)
    except OSError as error:
        raise ConfigError(f"cannot use {run_dir}: {error}") from error
    print(escape_unprintable(summary))
    print(f"all of it, with stacks and logs: {path}")
    return 0


def _make_bundle(run_dir: Path) -> Path:
    notice, address = _find_job(run_dir)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    path = bundle_path(run_dir, name)
    request = JobRequest(job=address.job, kind="dump", bundle=name)
    if not is_reachable(address):
        _request_job(notice, address, request)
    elif not run_interruptibly(_call_supervisor(address, request)):
        files = report_processes(_roots(address), run_dir / "logs")
        write_bundle(path, "the supervisor does not answer", None, {"node-0": files})
        return path
    _wait_until(
        lambda: path.exists() or _has_ended(notice, address),
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
