"""Runs a daemon of the cluster until SIGTERM, then kills everything that it has left.

    python daemon_host.py PROGRAM [ARGUMENT ...]

It reaps orphans of the daemon's jobs at once, as init does on a node. Slurm waits for that: a
process that has ended and was not reaped still belongs to its job.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

from umbra.runtime.process.descendants import kill_all_descendants
from umbra.runtime.process.prctl import become_subreaper, set_parent_death_signal


def main() -> None:
    become_subreaper()
    daemon = subprocess.Popen(sys.argv[1:])

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(daemon.pid, number)

    signal.signal(signal.SIGTERM, pass_on)
    set_parent_death_signal(signal.SIGTERM)  # pytest may be killed
    while os.wait()[0] != daemon.pid:
        pass
    kill_all_descendants(deadline_s=10.0)


if __name__ == "__main__":
    main()
