"""The program of a follower of an SGLang engine: runs SGLang's schedulers of its node.

    python -m umbra.engines.sglang.sglang_follower < task      see `EngineFollower.follow`

The first scheduler, on the leading part's node, sends work to these schedulers itself.
"""

from __future__ import annotations

import json
import os
import sys
from multiprocessing import connection
from pathlib import Path
from typing import Any

from umbra.engines.sglang.sglang_library import SglangLibrary, end_on_sigquit, temporary_files_in
from umbra.engines.shell.engine_follower import network_variables


def main() -> None:
    """Ends with status 1 when a scheduler has ended, or could not start."""
    task: dict[str, Any] = json.load(sys.stdin)
    address: str = task["address"]
    for name, value in ({"SGLANG_HOST_IP": address} | network_variables(address)).items():
        os.environ.setdefault(name, value)
    os.environ.update(task["variables"])
    os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"  # else Engine would serve health checks
    library = SglangLibrary.load()
    with temporary_files_in(Path(task["folder"])):
        engine = library.Engine(**task["options"], custom_sigquit_handler=end_on_sigquit)
    connection.wait([os.pidfd_open(pid) for pid in engine.get_all_child_pids()])
    print("one of SGLang's schedulers has ended", flush=True)
    os._exit(1)  # SGLang's own end waits for the others, which are killed with this program


if __name__ == "__main__":
    main()
