"""The program of a machine that only generates: it adds engines to a running job.

    python -m umbra.runtime.node --join RUN_DIR
    python -m umbra.runtime.node --join HOST:PORT --secret-file FILE

    this program ─▶ guardian ─▶ supervisor ── joins ──▶ supervisor of rank 0's node
                                  └ engines ◀── weights, requests ──

The engines belong to the pool that gets the trainer's weights: as many as this machine's GPUs hold,
or one on the CPU. Their settings are the job's, so the model is at the same path here. The program
ends with the job. After SIGTERM, SIGINT or SIGHUP, or if anything here is killed, the machine
leaves, and its trajectories continue on the job's other engines from their tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop

from umbra.runtime.cluster.environment import (
    is_secret_file_named,
    log_level,
    secret_file,
    socket_root,
    unique_pid,
    visible_gpus,
)
from umbra.runtime.cluster.guardian_process import GuardianProcess
from umbra.runtime.cluster.job_nodes import JobNode, key_digest, own_address
from umbra.runtime.cluster.run_requests import RunNotice, supervisor_ref
from umbra.runtime.cluster.socket_dir import socket_dir_path
from umbra.runtime.errors import (
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    JobFailed,
    RemoteError,
    UmbraError,
)
from umbra.runtime.process.nvml import count_gpus, gpu_sizes
from umbra.runtime.process.process_end import STOP_SIGNALS
from umbra.runtime.process.signal_handling import delayed_stops, handle_signals
from umbra.runtime.rpc.curve_keys import CurveKeys
from umbra.runtime.rpc.loop_socket import endpoint_at, split_endpoint
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.settings import to_wire
from umbra.runtime.supervisor.supervisor import SupervisorConfig
from umbra.runtime.supervisor.supervisor_main import allow_many_files, start_supervisor

_JOB: Final = "node"
"""Stands in the socket directory's name for the job's, which an address does not tell."""
_LOOK_INTERVAL_S: Final = 0.5
_CONNECT_LIMIT_S: Final = 5.0
_JOIN_LIMIT_S: Final = 60.0
_GRACE_S: Final = 5.0
"""Time from this machine's leaving to SIGKILL of its remaining processes."""
_END_LIMIT_S: Final = 2 * _GRACE_S + 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundJob:
    name: str  # for people
    host: str  # of the supervisor of rank 0's node
    port: int  # of the same
    secret_file: Path  # with the job's keys
    log_dir: Path  # holds a folder of logs for each node
    trace_dir: str = ""  # folder of the job's trace; "" if it has none, or was found at an address


def find_job(join: str, given_secret: Path | None, within_s: float) -> FoundJob:
    """Waits until the job listens.

    Args:
        join: its run directory, or HOST:PORT.
        given_secret: file with its keys; None for the one that the job names.

    Raises:
        ConfigError: `join` is neither, or the job listens on no address.
        DeadlineExceeded: no job listens there.
    """
    deadline = time.monotonic() + within_s
    run_dir = Path(join)
    if given_secret is None and is_secret_file_named():
        given_secret = secret_file("")
    while True:
        if ":" in join:
            found = _at_address(join, given_secret)
        elif run_dir.is_dir():
            found = _in_run_dir(run_dir, given_secret)
        else:
            raise ConfigError(f"--join {join}: give a job's run.dir, or HOST:PORT")
        if found is not None and _listens(found):
            return found
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"no job listens at {join} within {within_s:g} s")
        time.sleep(_LOOK_INTERVAL_S)


def _at_address(join: str, given_secret: Path | None) -> FoundJob:
    host, port = split_endpoint(join)
    if not host or not port.isdecimal():
        raise ConfigError(f"--join {join}: give a job's run.dir, or HOST:PORT")
    if given_secret is None:
        raise ConfigError(
            f"--join {join}: give --secret-file FILE, a copy of the job's keys; "
            "RUN_DIR/supervisor.json names the file"
        )
    return FoundJob(
        name=join,
        host=host,
        port=int(port),
        secret_file=given_secret,
        log_dir=Path("logs"),
    )


def _in_run_dir(run_dir: Path, given_secret: Path | None) -> FoundJob | None:
    address = RunNotice(run_dir).address()
    if address is None:
        return None
    if not address.tcp_endpoint:
        raise ConfigError(
            f"the job in {run_dir} listens on no address: start it with UMBRA_HOST_ADDRESS set to "
            "the address of its host that this machine reaches"
        )
    host, port = split_endpoint(address.tcp_endpoint)
    return FoundJob(
        name=str(run_dir),
        host=host,
        port=int(port),
        secret_file=given_secret or Path(address.secret_file),
        log_dir=run_dir / "logs",
        trace_dir=str((run_dir / "trace").absolute()) if address.has_trace else "",
    )


def _listens(job: FoundJob) -> bool:
    try:
        socket.create_connection((job.host, job.port), _CONNECT_LIMIT_S).close()
    except OSError:
        return False
    return True


def _load_keys(path: Path) -> CurveKeys:
    try:
        return CurveKeys.load(path)
    except ConfigError as error:
        raise ConfigError(
            f"{error}: copy the job's file of keys here with mode 0600, and name it by "
            "--secret-file or UMBRA_SECRET_FILE"
        ) from error


def generate(job: FoundJob) -> int:
    """Generates for the job until it is over, or until a stop signal; returns the exit status.
    Raises UmbraError if this machine cannot join, or the job or something here has failed."""
    keys = _load_keys(job.secret_file)
    allow_many_files()
    node_id = f"{socket.gethostname()}-{unique_pid(os.getpid())}"
    log_dir = job.log_dir / node_id
    settings = SupervisorConfig(
        node_id=node_id,
        log_dir=str(log_dir.absolute()),
        run_dir="",
        socket_dir=str(socket_dir_path(_JOB, node_id, socket_root())),
        tcp_host=own_address(job.host, job.port),
        secret_file=str(job.secret_file.absolute()),
        log_level=log_level(),
        trace_dir=job.trace_dir,
    )
    gpus = visible_gpus(count_gpus())
    print(f"logs: {log_dir}", flush=True)
    with _start_supervisor(settings) as guardian:
        try:
            ready = guardian.wait_ready(_JOIN_LIMIT_S)
            me = JobNode(
                node_id=node_id,
                num_ranks=0,
                gpus=gpus,
                gpu_nbytes=tuple(gpu_sizes(gpus)),
                tcp_endpoint=ready["tcp_endpoint"],
                key_digest=key_digest(keys),
            )
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_take_part(job, me, settings))
        finally:
            if guardian.wait(_END_LIMIT_S) is None:
                guardian.stop(_END_LIMIT_S)


def _start_supervisor(settings: SupervisorConfig) -> GuardianProcess:
    owner_pidfd = os.pidfd_open(os.getpid())
    try:
        with delayed_stops():
            return start_supervisor(_JOB, settings, owner_pidfd, _GRACE_S)
    finally:
        os.close(owner_pidfd)


async def _take_part(job: FoundJob, me: JobNode, settings: SupervisorConfig) -> int:
    stopped_by: list[int] = []
    task = asyncio.current_task()
    assert task is not None

    def leave(number: int) -> None:
        if not stopped_by:
            stopped_by.append(number)
            task.cancel()

    handle_signals(STOP_SIGNALS, leave)
    endpoint = endpoint_at(job.host, job.port)
    lead = JobNode(node_id=endpoint.removeprefix("tcp://"), num_ranks=0, tcp_endpoint=endpoint)
    ref = supervisor_ref(me.node_id, Path(settings.socket_dir))
    try:
        async with Client(me.node_id) as client:
            arguments = to_wire(lead), to_wire(me), _JOIN_LIMIT_S
            stream = client.handle(ref).stream("generate", *arguments, timeout_s=None)
            async with stream as lines:
                async for line in lines:
                    print(f"{job.name}: {line}", flush=True)
    except asyncio.CancelledError:
        print(f"{job.name}: left the job after {signal.Signals(stopped_by[0]).name}")
        return 128 + stopped_by[0]
    except ConnectionLost as error:
        raise JobFailed(
            f"the supervisor of this machine ended: see the end of {settings.log_dir}/"
            "supervisor.log"
        ) from error
    except RemoteError as error:
        raise JobFailed(error.remote_message) from None
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m umbra.runtime.node",
        description="Adds this machine's engines to a running job, until that job is over.",
    )
    parser.add_argument("--join", required=True, metavar="RUN_DIR|HOST:PORT")
    parser.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="the job's keys (default: UMBRA_SECRET_FILE, else the file that RUN_DIR names)",
    )
    parser.add_argument(
        "--within",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest wait for the job to start (default 600)",
    )
    arguments = parser.parse_args(argv)
    try:
        job = find_job(arguments.join, arguments.secret_file, arguments.within)
        return generate(job)
    except UmbraError as error:
        print(f"umbra.runtime.node: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
