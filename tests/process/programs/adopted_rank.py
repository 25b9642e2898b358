"""Starts a rank whose agent has ended before the rank's first instruction, for tests:

    python adopted_rank.py JSON

JSON is {"rank": [program, ...], "environ": {...}, "adopter": [program, ...]}. The rank's parent is
`adopter`, which this process becomes; the rank's pid is printed.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from umbra.runtime.process import prctl
from umbra.runtime.process.descendants import child_pids


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    prctl.become_subreaper()  # This survives `exec`.
    read_fd, write_fd = os.pipe()
    agent_pid = os.fork()
    if agent_pid == 0:
        if os.fork() == 0:
            os.read(read_fd, 1)
            os.execve(job["rank"][0], job["rank"], {**os.environ, **job["environ"]})
        os._exit(0)
    os.waitpid(agent_pid, 0)
    (rank_pid,) = child_pids(os.getpid())
    print(rank_pid, flush=True)
    os.write(write_fd, b".")
    os.execv(job["adopter"][0], job["adopter"])


if __name__ == "__main__":
    main()
