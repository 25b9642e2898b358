"""`python -m reported_process FILE STATUS`: writes what the process looks like, and ends."""

import json
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    descriptors = {name: os.readlink(f"/proc/self/fd/{name}") for name in ("0", "1", "2")}
    report = {
        "argv": sys.argv[1:],
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "environ": dict(os.environ),
        "shown_command": Path("/proc/self/cmdline").read_text(),
        "shown_environ": sorted(Path("/proc/self/environ").read_text().split("\0")),
        "folder": os.getcwd(),
        "is_leader": os.getsid(0) == os.getpid(),
        "signals": {str(number): str(signal.getsignal(number)) for number in signal.Signals},
        "descriptors": descriptors,
        "num_descriptors": len(os.listdir("/proc/self/fd")),
        "is_buffered": not sys.stdout.write_through,  # pyright: ignore
        "name": __name__,
    }
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1))
    match sys.argv[2]:
        case "raise":
            raise ValueError("so it ends")
        case "message":
            sys.exit("so it ends")
        case status:
            sys.exit(int(status))


if __name__ == "__main__":
    main()
