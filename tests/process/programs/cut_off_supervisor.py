"""A supervisor whose rank ends and gets no successor, as on a node that is cut off.

    python cut_off_supervisor.py RUN_DIR SOCKET_DIR RANK_PID

It starts an engine, kills the rank, and must then end the engine and itself. It exits with status 0
if it does. It needs a process of its own, because a supervisor kills all children that it did not
start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from pathlib import Path

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.node_context import NodeSettings
from umbra.runtime.cluster.run_requests import supervisor_ref
from umbra.runtime.process.prctl import become_subreaper
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.settings import to_wire
from umbra.runtime.supervisor import rank_calls
from umbra.runtime.supervisor.supervisor import Supervisor, SupervisorConfig

_START_LIMIT_S = 60.0
_END_LIMIT_S = 30.0
_ENGINE = ActorSpec(
    name="engine",
    role="engine",
    target="actors:Echo",
    sys_path=(str(Path(__file__).parent),),
    start_timeout_s=_START_LIMIT_S,
)


async def run(run_dir: Path, socket_dir: Path, rank_pid: int) -> None:
    node = NodeSettings(
        node_id="node",
        socket_dir=socket_dir,
        log_dir=run_dir,
        supervisor=supervisor_ref("node", socket_dir),
        tcp_host="",
        keys=(),
        log_level=logging.INFO,
    )
    config = SupervisorConfig(
        node_id="node",
        log_dir=str(run_dir),
        run_dir=str(run_dir),
        socket_dir=str(socket_dir),
        tcp_host="",
        secret_file="",
        log_level=logging.INFO,
        nodes_may_change=True,
    )
    async with Client("node") as client, asyncio.TaskGroup() as tasks:
        cut_off = Supervisor(node, config, client)
        running = tasks.create_task(cut_off.run())
        await asyncio.to_thread(_await_file, socket_dir / "fds")
        events = cut_off.rank_calls.attach(0, 1, rank_pid, 1, True, "a round")
        assert (await anext(events))["kind"] == "attached"
        await cut_off.actor_calls.spawn(to_wire(_ENGINE))
        os.kill(rank_pid, signal.SIGKILL)
        async for _ in events:
            pass
        assert [row["state"] for row in cut_off.actor_calls.list_actors()] == ["RUNNING"]
        async with asyncio.timeout(_END_LIMIT_S):
            await running
        assert [row["state"] for row in cut_off.actor_calls.list_actors()] == ["STOPPED"]


def _await_file(path: Path) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while not path.exists():  # a file has no event
        assert time.monotonic() < deadline, "the supervisor does not start"
        time.sleep(0.01)


def main() -> None:
    run_dir, socket_dir, rank_pid = sys.argv[1:]
    become_subreaper()
    rank_calls._WARM_LIMIT_S = 0.2  # pyright: ignore
    asyncio.run(run(Path(run_dir), Path(socket_dir), int(rank_pid)))


if __name__ == "__main__":
    main()
