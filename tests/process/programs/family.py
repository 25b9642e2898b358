"""A process with a family, for tests: python family.py REPORT_FD member ...

It starts the members named, writes `{"name": pid}` as one JSON line to REPORT_FD when all are up,
and sleeps until it is killed. Members:

- child: a plain child
- daemon: a grandchild, double-forked, in a session of its own, with an empty environment
- stopped: a child that has been SIGSTOPped
- deaf: the process itself ignores SIGTERM
- restless: a daemon that keeps forking itself and ending, so its pid changes all the time
"""

from __future__ import annotations

import json
import os
import signal
import sys


def main() -> None:
    report_fd, members = int(sys.argv[1]), sys.argv[2:]
    report = {"self": os.getpid()}
    for member in members:
        match member:
            case "child":
                report[member] = _fork_sleeper()
            case "stopped":
                report[member] = _fork_sleeper()
                os.kill(report[member], signal.SIGSTOP)
                os.waitpid(report[member], os.WUNTRACED)
            case "daemon":
                report[member] = _fork_daemon(
                    [sys.executable, "-ISc", "import signal; signal.pause()"]
                )
            case "restless":
                report[member] = _fork_daemon(None)
            case "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case _:
                raise ValueError(member)
    os.write(report_fd, json.dumps(report).encode() + b"\n")
    while True:
        signal.pause()


def _fork_sleeper() -> int:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    return pid


def _fork_daemon(argv: list[str] | None) -> int:
    """Double fork and setsid; the pid comes back through a pipe. `argv` None: restless."""
    read_fd, write_fd = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write_fd, str(os.getpid()).encode())
            if argv is not None:
                os.execve(argv[0], argv, {})
            while os.fork() == 0:
                pass
        os._exit(0)
    os.waitpid(middle, 0)
    pid = int(os.read(read_fd, 32))
    os.close(read_fd)
    os.close(write_fd)
    return pid


if __name__ == "__main__":
    main()
