"""Starts `umbra dash` and asks it; imports little, so that measuring memory is not disturbed."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

TIMEOUT_S: Final = 300.0
PROGRAM: Final = "import sys; from umbra.runtime.cli.umbra_command import main; sys.exit(main())"


@contextlib.contextmanager
def serving(run_dir: Path) -> Generator[tuple[int, str]]:
    """Pid and address of `umbra dash`."""
    command = [sys.executable, "-c", PROGRAM, "dash", str(run_dir), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://(\S+)/", process.stdout.readline())
        assert found is not None
        try:
            yield process.pid, found[1]
        finally:
            process.send_signal(signal.SIGINT)


def ask(address: str, path: str) -> tuple[float, Any]:
    """Seconds until the whole answer is there, and the answer."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    began = time.perf_counter()
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read()
    took_s = time.perf_counter() - began
    assert response.status == 200, body
    connection.close()
    return took_s, json.loads(body)
