"""The main program of the supervisor's process, started by the guardian.

    python -m umbra.runtime.supervisor.supervisor_main [RUN_DIR] --ready-fd N --guardian-pid PID

RUN_DIR is for people who look at processes. Standard input carries one JSON object
(`SupervisorConfig`). Once it serves, it writes one line to the ready pipe. It ends when the job is
over, or when the guardian dies; by then every descendant has ended. A stop signal, received
directly or through the guardian, stops the ranks, and the job ends with the last of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import uvloop
import zmq

from umbra.runtime.actor.node_context import NodeSettings
from umbra.runtime.cluster.environment import socket_root
from umbra.runtime.cluster.guardian_process import GuardianProcess, start_guardian
from umbra.runtime.cluster.run_requests import supervisor_ref
from umbra.runtime.cluster.socket_dir import SocketDir
from umbra.runtime.errors import ConfigError
from umbra.runtime.process.descendants import kill_all_descendants
from umbra.runtime.process.orphans import end_orphans
from umbra.runtime.process.prctl import become_subreaper
from umbra.runtime.process.process_end import STOP_SIGNALS, PidWatch
from umbra.runtime.process.signal_handling import handle_signals
from umbra.runtime.process.thread_stacks import answer_stack_requests
from umbra.runtime.rpc.curve_keys import CurveKeys, holding_keys
from umbra.runtime.rpc.loop_socket import endpoint_at
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.rpc.rpc_server import ActorServer
from umbra.runtime.supervisor.supervisor import Supervisor, SupervisorConfig
from umbra.runtime.tracing.spans import recording

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0
"""Interval of checks for orphans and the socket directory. Longer: orphans live longer."""

_NUM_FILES = 262_144
"""Files that a process may open if the hard limit allows it. A connection takes four, and the
common soft limit, 1,024, ends at 250 connections. More: programs that close all possible files when
they start, one by one, take seconds."""


def allow_many_files() -> None:
    """Raises the soft limit of open files, for this process and all that it starts: a rank, or the
    program of a machine that only generates, calls it before `start_supervisor`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(_NUM_FILES, hard)), hard))


def start_supervisor(
    job: str, settings: SupervisorConfig, owner_pidfd: int, grace_s: float
) -> GuardianProcess:
    """Starts a node's guardian and supervisor; see `start_guardian`.

    Args:
        job: stands in the name of the socket directory.
    """
    program = [sys.executable, "-m", "umbra.runtime.supervisor.supervisor_main"]
    return start_guardian(
        [*program, settings.run_dir] if settings.run_dir else program,
        config=settings.to_json(),
        socket_dir=SocketDir.create(job, settings.node_id, socket_root()),
        log_path=Path(settings.log_dir) / "supervisor.log",
        grace_s=grace_s,
        owner_pidfd=owner_pidfd,
        keys_to_remove=settings.keys_to_remove,
    )


async def serve(config: SupervisorConfig, ready_fd: int, guardian_pid: int) -> None:
    socket_dir = Path(config.socket_dir)
    keys = CurveKeys.load(Path(config.secret_file)) if config.secret_file else None
    ref = supervisor_ref(config.node_id, socket_dir)
    node = NodeSettings(
        node_id=config.node_id,
        socket_dir=socket_dir,
        log_dir=Path(config.log_dir),
        supervisor=ref,
        tcp_host=config.tcp_host,
        keys=() if keys is None else (keys.public, keys.secret),
        log_level=config.log_level,
        trace_dir=config.trace_dir,
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    async with Client(config.node_id, keys) as client:
        supervisor = Supervisor(node, config, client)
        handle_signals(STOP_SIGNALS, supervisor.stop_job)

        def on_guardian_end() -> None:
            # Without a guardian, the supervisor's own death would leave orphans.
            supervisor.end_for(
                "the guardian",
                f"its process (pid {guardian_pid}) ended; without it nothing would clean up",
            )

        server = ActorServer(supervisor.calls, ref.incarnation, client)
        with contextlib.ExitStack() as stack:
            if config.secret_file:
                stack.enter_context(holding_keys(Path(config.secret_file)))
            # Not `term`, which would wait forever for a socket whose server never ran.
            stack.callback(context.destroy, linger=0)
            stack.enter_context(PidWatch.of_parent(guardian_pid, on_guardian_end))
            server.bind(context.socket(zmq.ROUTER), ref.ipc_endpoint)
            tcp_endpoint = ""
            if keys is not None and config.tcp_host:
                stack.callback(keys.admit_only_job(context).stop)
                socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
                keys.secure_server(socket)
                try:
                    tcp_endpoint = server.bind(socket, endpoint_at(config.tcp_host, "*"))
                except zmq.ZMQError as error:
                    raise ConfigError(
                        f"cannot listen on {config.tcp_host!r}: {error.strerror}; set "
                        "UMBRA_HOST_ADDRESS (tcp_host of a session) to an address of this host "
                        "that the other nodes can reach"
                    ) from error
            os.write(ready_fd, json.dumps({"tcp_endpoint": tcp_endpoint}).encode() + b"\n")
            os.close(ready_fd)
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(server.run())
                looking = tasks.create_task(_look_around(supervisor, socket_dir))
                try:
                    await supervisor.run(tcp_endpoint)
                finally:
                    serving.cancel()
                    looking.cancel()


async def _look_around(supervisor: Supervisor, socket_dir: Path) -> None:
    """Ends orphans, and stops a job whose sockets were removed."""
    is_reachable = True
    while True:
        await asyncio.sleep(_LOOK_INTERVAL_S)
        await end_orphans(deadline_s=10.0)
        if is_reachable and not socket_dir.exists():  # noqa: ASYNC240  it is node-local
            is_reachable = False
            text = (
                f"{socket_dir} with this job's sockets was removed, so that no weights can be sent "
                "and no actor replaced: what runs here is stopped; start it again with "
                "UMBRA_SOCKET_ROOT set to a folder that nothing cleans"
            )
            supervisor.notes.note(text, "fault", "supervisor")
            if not supervisor.is_stopping:
                supervisor.stop_job(signal.SIGTERM, cause="its sockets were removed")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", nargs="?")
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--guardian-pid", type=int, required=True)
    arguments = parser.parse_args()
    os.set_inheritable(arguments.ready_fd, False)
    become_subreaper()
    answer_stack_requests()
    config = SupervisorConfig.from_json(sys.stdin.buffer.read())
    logging.basicConfig(
        level=config.log_level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        with (
            recording(config.trace_dir, config.node_id, "supervisor"),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(serve(config, arguments.ready_fd, arguments.guardian_pid))
    except Exception:
        logger.exception("the supervisor died")
        sys.exit(1)
    finally:
        kill_all_descendants(deadline_s=30.0)
        if os.getppid() != arguments.guardian_pid:
            shutil.rmtree(config.socket_dir, ignore_errors=True)
            if config.keys_to_remove:
                Path(config.keys_to_remove).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
