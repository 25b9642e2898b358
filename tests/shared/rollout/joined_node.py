"""A machine that only generates, for tests: `python -m umbra.runtime.node` beside the job."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from watching import DEADLINE_S, tree

_LOOK_S = 0.02


class JoinedNode:
    """Runs the program with these arguments. A context manager: it is killed on exit."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.output = folder / "node.log"
        program = [sys.executable, "-m", "umbra.runtime.node", *arguments]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                program, stdout=output, stderr=subprocess.STDOUT, cwd=folder
            )

    def text(self) -> str:
        return self.output.read_text()

    def wait(self, within_s: float = DEADLINE_S) -> int:
        """Its exit status."""
        return self.process.wait(within_s)

    def wait_for_text(self, text: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(_LOOK_S)

    def tree(self) -> list[int]:
        """The program, its guardian, its supervisor, and engines."""
        return tree(self.process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)
