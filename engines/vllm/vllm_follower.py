"""The program of a follower of a vLLM engine: runs vLLM's workers of its node.

    python -m umbra.engines.vllm.vllm_follower < task      see `EngineFollower.follow`

vLLM's leading part, on another node, sends work to these workers itself.
"""

from __future__ import annotations

import json
import os
import sys
from multiprocessing import connection
from typing import Any

from umbra.engines.shell.engine_follower import network_variables
from umbra.engines.vllm.vllm_library import VllmLibrary, file_variables, unlink_shared_memory


def main() -> None:
    """Ends with status 1 when a worker has ended, or could not start."""
    task: dict[str, Any] = json.load(sys.stdin)
    address: str = task["address"]
    variables = task["variables"] | {"VLLM_HOST_IP": address} | network_variables(address)
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    library = VllmLibrary.load()
    for name, value in file_variables(task["folder"], is_cpu=library.is_cpu).items():
        os.environ.setdefault(name, value)
    config = library.AsyncEngineArgs(**task["options"]).create_engine_config(headless=True)
    executor = library.MultiprocExecutor(config, monitor_workers=False)
    unlink_shared_memory()
    connection.wait([worker.proc.sentinel for worker in executor.workers])
    print("one of vLLM's workers has ended", flush=True)
    os._exit(1)  # vLLM would wait for the others, which are killed with this program


if __name__ == "__main__":
    main()
