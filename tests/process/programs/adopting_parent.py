"""A subreaper whose children leave children behind, and which also has ended children of its own.

    python adopting_parent.py

Prints a line of JSON: how many adopted children there are that have ended, before and after they
are reaped, the exit statuses of its own, and how many of these it still takes for its own, whose
numbers others may get.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import time
from typing import Any

from umbra.runtime.process import orphans
from umbra.runtime.process.descendants import child_pids, process_stat
from umbra.runtime.process.orphans import AdoptedChildren, note_own_children
from umbra.runtime.process.prctl import become_subreaper

NUM_ADOPTED = 5


def ended() -> set[int]:
    stats = {pid: process_stat(pid) for pid in child_pids(os.getpid())}
    return {pid for pid, stat in stats.items() if stat is not None and stat.has_ended}


def is_running(pid: int) -> bool:
    stat = process_stat(pid)  # multiprocessing itself reaps one that has ended, at times
    return stat is not None and not stat.has_ended


def adopt() -> None:
    """A shell in between ends before what it started, which reports its end by closing a pipe."""
    for _ in range(NUM_ADOPTED):
        subprocess.run(["sh", "-c", "read line < /dev/null & exit 0"], check=True)


async def with_asyncio() -> int:
    child = await asyncio.create_subprocess_exec("sh", "-c", "exit 6")
    reap_twice()
    return await child.wait()


def reap_twice() -> None:
    children = AdoptedChildren()
    children.reap()
    children.reap()


def reap_what_is_gone() -> None:
    """Another thread waits for any child just before."""
    wait = os.waitpid

    def wait_too_late(pid: int, options: int) -> tuple[int, int]:
        wait(pid, options)
        return wait(pid, options)

    os.waitpid = wait_too_late
    reap_twice()
    os.waitpid = wait


def main() -> None:
    become_subreaper()
    note_own_children()
    program = subprocess.Popen(["sh", "-c", "exit 3"])
    forked = os.fork()
    if forked == 0:
        os._exit(4)
    processes: list[Any] = []
    for method in ("fork", "spawn"):
        context: Any = multiprocessing.get_context(method)
        processes.append(context.Process(target=os._exit, args=(5,)))
        processes[-1].start()
    spawned = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 7"], os.environ)
    adopt()
    own = {program.pid, forked, spawned, *(process.pid for process in processes)}
    while any(map(is_running, own)) or len(ended() - own) < NUM_ADOPTED:
        time.sleep(0.01)
    before = len(ended() - own)
    reap_what_is_gone()
    after = len(ended() - own)
    by_asyncio = asyncio.run(with_asyncio())
    for process in processes:
        process.join()
    statuses = {
        "subprocess": program.wait(),
        "os.fork": os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]),
        "fork": processes[0].exitcode,
        "spawn": processes[1].exitcode,
        "posix_spawn": os.waitstatus_to_exitcode(os.waitpid(spawned, 0)[1]),
        "asyncio": by_asyncio,
    }
    AdoptedChildren().reap()
    print(json.dumps([before, after, statuses, len(own & vars(orphans)["_started"])]))


if __name__ == "__main__":
    main()
