"""A supervisor in small, for tests of the guardian.

    python small_supervisor.py MODE --ready-fd N --guardian-pid PID

It keeps one child with a whole family (family.py), reports every pid as its ready line, and ends
the way a supervisor must: at a stop signal (MODE `polite`; `deaf` ignores it), and when its
guardian has ended. Its stdin is JSON: {"socket_dir": path}. MODE `broken`: it fails before it is
ready.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import uvloop

from umbra.runtime.process import descendants, prctl
from umbra.runtime.process.child_process import ChildProcess
from umbra.runtime.process.process_end import PidWatch


async def run(mode: str, ready_fd: int, guardian_pid: int) -> None:
    socket_dir = json.load(sys.stdin)["socket_dir"]
    if mode == "broken":
        raise SystemExit("no such pool: x")
    prctl.become_subreaper()
    stop, guardian_lost = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    read_fd, write_fd = os.pipe()
    family = str(Path(__file__).with_name("family.py"))
    argv = [sys.executable, family, str(write_fd), "child", "daemon", "stopped", "deaf", "restless"]

    def on_guardian_end() -> None:
        guardian_lost.set()
        stop.set()

    with PidWatch.of_parent(guardian_pid, on_guardian_end):
        child = ChildProcess.spawn("family#1", argv, pass_fds=[write_fd])
        async with child:
            report = json.loads(os.read(read_fd, 4096))
            report["supervisor"] = os.getpid()
            del report["restless"]
            os.write(ready_fd, json.dumps(report).encode() + b"\n")
            await stop.wait()
            if mode == "deaf" and not guardian_lost.is_set():
                await asyncio.Event().wait()
    if guardian_lost.is_set():
        descendants.kill_all_descendants(10.0)
        shutil.rmtree(socket_dir)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--guardian-pid", type=int, required=True)
    arguments = parser.parse_args()
    uvloop.run(run(arguments.mode, arguments.ready_fd, arguments.guardian_pid))


if __name__ == "__main__":
    main()
