"""One rank of a test's world: `python -m umbra.runtime.testing.world_rank TEST CALL OUTCOME`.

It imports the function, initialises `torch.distributed` and writes the function's result or error
to the file OUTCOME. It ends with its parent, which is the process TEST or ends with it. SIGUSR1
makes it write the stacks of all threads to its output.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from umbra.runtime.process.descendants import process_stat
from umbra.runtime.process.prctl import die_with_parent, exit_as_orphan
from umbra.runtime.testing.distributed_world import WorldCall, WorldOutcome, pack, unpack


def main() -> None:
    """Exits with status 1 if the function raised."""
    die_with_parent(os.getppid())
    test = process_stat(int(sys.argv[1]))
    if test is None or test.is_ending:  # it ended before the kernel knew that this one should
        exit_as_orphan("the test has ended: exiting")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    call = unpack(WorldCall, Path(sys.argv[2]).read_bytes())
    sys.path[:] = call.sys_path
    try:
        data = pack(WorldOutcome(value=_run(call)))
        status = 0
    except Exception as error:  # noqa: BLE001 -- passed to the test's process
        failed_at = time.monotonic()
        text = f"{type(error).__name__}: {error}"
        trace = traceback.format_exc()
        data = pack(WorldOutcome(error=text, traceback=trace, failed_at=failed_at))
        status = 1
    path = Path(sys.argv[3])
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    partial.rename(path)
    # No orderly end: it takes a second with torch, and a broken process group may block in
    # its destructor.
    sys.stdout.flush()
    os._exit(status)


def _run(call: WorldCall) -> object:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        call.backend,
        init_method=f"file://{call.store_path}",
        rank=int(os.environ["RANK"]),
        world_size=call.num_ranks,
        timeout=timedelta(seconds=call.timeout_s),
    )
    function: Any = importlib.import_module(call.module)
    for part in call.function.split("."):
        function = getattr(function, part)
    value = function(*call.args, **call.kwargs)
    # A rank that leaves early would break connections that others still use.
    dist.barrier()
    dist.destroy_process_group()
    return value


if __name__ == "__main__":
    main()
