"""Runs the supervisors of several nodes in one process, each as `supervisor_host` runs one.

    python cluster_nodes.py READY_FD < NODES

NODES is a JSON list of `SupervisorConfig`s. The pipe READY_FD gets one line of each as soon as it
serves. The process ends when the jobs of all of them are over, or with its parent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys

import uvloop

from umbra.runtime.process.descendants import kill_all_descendants
from umbra.runtime.process.prctl import become_subreaper
from umbra.runtime.supervisor_host import SupervisorConfig, serve

_KILL_DEADLINE_S = 10.0


async def _serve_all(configs: list[SupervisorConfig], ready_fd: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        for config in configs:
            tasks.create_task(serve(config, os.dup(ready_fd), os.getppid()))
        os.close(ready_fd)


def main() -> None:
    become_subreaper()
    configs = [SupervisorConfig(**fields) for fields in json.load(sys.stdin)]
    logging.basicConfig(level=configs[0].log_level, stream=sys.stderr)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_all(configs, int(sys.argv[1])))
    finally:
        kill_all_descendants(_KILL_DEADLINE_S)


if __name__ == "__main__":
    main()
