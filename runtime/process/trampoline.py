"""Runs a foreign program so that it dies with its parent; it is the first code in the new process.

    python -I -S trampoline.py PARENT_PID program [argument ...]

It asks for SIGKILL at its parent's death, becomes the subreaper of the program's descendants, and
becomes the program by `exec` (same pid). Standard library only; about 10 ms. Exit status 127: the
program cannot be executed; the reason is on stderr.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umbra.runtime.process import prctl
else:
    import importlib.util

    _spec = importlib.util.spec_from_file_location(
        "prctl", os.path.join(os.path.dirname(os.path.abspath(__file__)), "prctl.py")
    )
    prctl = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(prctl)


def main() -> None:
    parent_pid, program = int(sys.argv[1]), sys.argv[2:]
    prctl.die_with_parent(parent_pid)
    prctl.become_subreaper()
    # This interpreter ignores both signals at start, and `exec` would pass that on.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.stderr.write(f"cannot execute {program[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


if __name__ == "__main__":
    main()
