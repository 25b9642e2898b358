"""`recorded_trainer` whose ranks print a line when their process group is up:

{"event": "process group", "rank", "pid", "incarnation", "at"}
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

from recorded_trainer import RecordedRollouts

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.trainer import policy_engines, run_parts
from umbra.trainer.command_line import main, run_program
from umbra.trainer.world.mesh import Mesh


class TimedMesh(Mesh):
    """Prints the line."""

    @classmethod
    @contextmanager
    def join(
        cls,
        environment: TorchrunEnvironment,
        device: Literal["auto", "cpu", "cuda"],
        timeout_s: float,
    ) -> Generator[Mesh]:
        with Mesh.join(environment, device, timeout_s) as world:
            line = {
                "event": "process group",
                "rank": world.rank,
                "pid": os.getpid(),
                "incarnation": environment.incarnation,
                "at": time.monotonic(),
            }
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
            yield world


if __name__ == "__main__":
    policy_engines.__dict__["Rollouts"] = RecordedRollouts
    run_parts.__dict__["Mesh"] = TimedMesh
    run_program(main)
