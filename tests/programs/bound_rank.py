"""A rank that does nothing: python bound_rank.py [FILE]

It binds itself to torchrun's agent, prints a line {"agent": pid, "lineage": pids}, and waits for
ever. With FILE it outlives the agent until its stdin ends, and then makes the file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from umbra.runtime.environment import bind_to_agent


def main() -> None:
    agent = bind_to_agent()
    assert agent is not None
    # One write: torchrun starts ranks with -u, and print() would write the line's end by itself.
    line = json.dumps({"agent": agent.pid, "lineage": agent.lineage})
    if len(sys.argv) > 1:
        with agent.outlived():
            os.write(1, f"{line}\n".encode())
            sys.stdin.read()
            Path(sys.argv[1]).touch()
    os.write(1, f"{line}\n".encode())
    signal.pause()


if __name__ == "__main__":
    main()
