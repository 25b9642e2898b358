"""A subreaper with two families (family.py), one of which dies: python orphan_keeper.py

It prints one JSON line: {"families": {"dead": pids, "living": pids}, "survivors": pids that
end_orphans could not end, "adopted": how many orphans it had before}, sleeps until its stdin ends,
and then ends everything with kill_all_descendants, reporting {"left": pids, "status": text}.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from umbra.runtime.process import descendants, prctl
from umbra.runtime.process.child_process import ChildProcess, living_pids
from umbra.runtime.process.orphans import end_orphans, kill_orphans

FAMILY = str(Path(__file__).with_name("family.py"))
MEMBERS = ["child", "daemon", "stopped", "deaf"]


async def run() -> None:
    prctl.become_subreaper()
    read_fd, write_fd = os.pipe()
    children: dict[str, ChildProcess] = {}
    families: dict[str, dict[str, int]] = {}
    for name, members in {"living": MEMBERS, "dead": [*MEMBERS, "restless"]}.items():
        argv = [sys.executable, FAMILY, str(write_fd), *members]
        children[name] = ChildProcess.spawn(name, argv, pass_fds=[write_fd])
        families[name] = json.loads(os.read(read_fd, 4096))
        families[name].pop("restless", None)
    assert kill_orphans() == []

    os.kill(children["dead"].pid, signal.SIGKILL)
    await children["dead"].wait()
    adopted = len(set(descendants.child_pids(os.getpid())) - living_pids())
    survivors = await end_orphans(10.0)
    say({"families": families, "survivors": survivors, "adopted": adopted})

    sys.stdin.read()
    left = descendants.kill_all_descendants(10.0)
    status = await children["living"].wait()
    say({"left": left, "status": str(status)})


def say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(run())
    finally:
        descendants.kill_all_descendants(10.0)
