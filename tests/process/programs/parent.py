"""Starts one child (family.py with a daemon) the way a supervisor does, and waits for its end.

python parent.py REPORT_FD: the child writes its pids to REPORT_FD.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from umbra.runtime.process.child_process import ChildProcess


async def run(report_fd: int) -> None:
    family = str(Path(__file__).with_name("family.py"))
    argv = [sys.executable, family, str(report_fd), "deaf"]
    async with ChildProcess.spawn("family", argv, pass_fds=[report_fd]) as child:
        await child.wait()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1])))
