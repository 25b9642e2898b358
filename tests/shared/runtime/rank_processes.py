"""Starts ranks without torchrun, and so without the seconds that importing torch takes.

A rank would not take this process for torchrun's agent, which is why it is given no variable of
torchrun's own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import Any, Self, TypeVar

from actor_specs import PROGRAMS
from watching import DEADLINE_S

from umbra.runtime.process import descendants

Found = TypeVar("Found", bound=Sized)


class Ranks:
    """The ranks of one job, running tests/process/programs/rank.py. This process is their agent."""

    def __init__(
        self, folder: Path, socket_root: Path, num_ranks: int, scenario: str, chosen: int
    ) -> None:
        self.run_dir = folder / "run"
        self._socket_root = socket_root
        self._outputs = [folder / f"rank{rank}.jsonl" for rank in range(num_ranks)]
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(num_ranks):
            errors_path = folder / f"rank{rank}.err"
            with self._outputs[rank].open("wb") as output, errors_path.open("wb") as errors:
                self.processes.append(
                    subprocess.Popen(
                        [
                            *(sys.executable, str(PROGRAMS / "rank.py"), str(self.run_dir)),
                            *(scenario, str(chosen)),
                        ],
                        env=self._environment(rank, num_ranks),
                        stdout=output,
                        stderr=errors,
                    )
                )

    def _environment(self, rank: int, num_ranks: int) -> dict[str, str]:
        return {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "UMBRA_SOCKET_ROOT": str(self._socket_root),
        }

    def events(self, name: str) -> dict[int, dict[str, Any]]:
        """The last event of that name of each rank that had one."""
        return read_events(self._outputs, name)

    def wait_for(self, name: str, num_ranks: int) -> dict[int, dict[str, Any]]:
        """Waits until `num_ranks` ranks had the event."""
        return poll(lambda: self.events(name), num_ranks, f"{num_ranks} ranks said {name!r}")

    def wait(self, within_s: float = DEADLINE_S) -> list[int]:
        """The exit statuses of all."""
        deadline = time.monotonic() + within_s
        return [process.wait(deadline - time.monotonic()) for process in self.processes]

    def tree(self) -> list[int]:
        """Every process of the job: supervisor, actors and so on."""
        mine = {process.pid for process in self.processes}
        found: list[int] = []
        for pid, _ in descendants.living_descendants(os.getpid()):
            if pid in mine or b"umbra.runtime" in _command(pid) or b"guardian.py" in _command(pid):
                found.append(pid)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(DEADLINE_S)


def read_events(outputs: Sequence[Path], name: str) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for output in outputs:
        for line in output.read_text().splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # Half a line, or a library's chatter.
            if event.get("event") == name:
                found[event["rank"]] = event
    return found


def poll(look: Callable[[], Found], num: int, what: str) -> Found:
    """Looks at files until there are so many events; a file has no event to wait for."""
    deadline = time.monotonic() + DEADLINE_S
    while len(found := look()) < num:
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}; {found}"
        time.sleep(0.02)
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
