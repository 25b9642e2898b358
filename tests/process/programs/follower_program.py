"""The program of a follower, for tests: writes its task to a file named in it, and waits."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    task = json.load(sys.stdin)
    task["pid"] = os.getpid()
    path = Path(os.environ["FOLLOWER_FILE"])
    path.with_suffix(".tmp").write_text(json.dumps(task))
    path.with_suffix(".tmp").rename(path)
    signal.pause()


if __name__ == "__main__":
    main()
