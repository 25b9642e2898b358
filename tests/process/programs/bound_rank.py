"""A rank that does nothing but binding itself to torchrun's agent.

It prints a line {"agent": pid, "lineage": pids}, and waits for ever.
"""

from __future__ import annotations

import json
import signal

from umbra.runtime.cluster.environment import bind_to_agent

if __name__ == "__main__":
    agent = bind_to_agent()
    assert agent is not None
    with agent.outlived():
        pass
    print(json.dumps({"agent": agent.pid, "lineage": agent.lineage}), flush=True)
    signal.pause()
