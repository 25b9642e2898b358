"""Runs one system's program (a script in `systems/`) and takes its one line of facts.

Peers live in an environment of their own. Their interpreter finds the few of our files that their
programs use, standard library only, so that none of our imports is charged to them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import umbra.runtime.process
from umbra.runtime.process.descendants import kill_all_descendants

_PROGRAM_TIMEOUT_S: Final = 120.0
"""Start, measurements and end of one system. Ray needs 15 s on two cores; one that hangs holds
the benchmark for so long."""
_KILL_DEADLINE_S: Final = 10.0
_MAX_ERROR_LINES: Final = 15
_HERE: Final = Path(__file__).resolve().parent
VERL_REVISION: Final = "1dda039"
"""Of the peer whose protocol `verl_protocol.py` has."""


class BenchError(RuntimeError):
    """A system under test did not run; the message has its last output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One system under test.

    Attributes:
        name: its key in the results.
        program: script in `systems/`, without its suffix.
        requires: module that its interpreter must be able to import.
        is_peer: whether it runs in the peers' interpreter.
    """

    name: str
    program: str
    requires: str
    is_peer: bool


UMBRA: Final = System(name="umbra", program="umbra_actor", requires="umbra", is_peer=False)
BARE_ZMQ: Final = System(name="bare_zmq", program="bare_zmq", requires="zmq", is_peer=False)
RAY: Final = System(name="ray", program="ray_actor", requires="ray", is_peer=True)
MONARCH: Final = System(name="monarch", program="monarch_actor", requires="monarch", is_peer=True)
XOSCAR: Final = System(name="xoscar", program="xoscar_actor", requires="xoscar", is_peer=True)
ALL_SYSTEMS: Final = (UMBRA, BARE_ZMQ, RAY, MONARCH, XOSCAR)


@contextlib.contextmanager
def peers_pythonpath() -> Generator[str]:
    """The peers' PYTHONPATH: this folder, and one whose `umbra.runtime` has only `process`."""
    with tempfile.TemporaryDirectory(prefix="umbra-bench-path-") as folder:
        runtime = Path(folder) / "umbra" / "runtime"
        runtime.mkdir(parents=True)
        (runtime / "process").symlink_to(umbra.runtime.process.__path__[0])
        yield os.pathsep.join([str(_HERE), folder])


def is_importable(python: str, module: str) -> bool:
    """Whether `python` has `module`; without importing it."""
    look = f"import sys, importlib.util as u; sys.exit(u.find_spec({module!r}) is None)"
    with tempfile.TemporaryDirectory() as empty_folder:
        found = subprocess.run(
            [python, "-c", look],
            cwd=empty_folder,
            capture_output=True,
            timeout=_PROGRAM_TIMEOUT_S,
            check=False,
        )
    return found.returncode == 0


def run_program(program: str, python: str, pythonpath: str, duration_s: float) -> dict[str, Any]:
    """Starts the program, waits for its end and returns its facts; leaves no process behind.

    This process must be a subreaper (`umbra.runtime.process.prctl`) with no other children.

    Args:
        pythonpath: of a peer, from `peers_pythonpath`; this interpreter keeps its own.

    Raises:
        BenchError: it failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as folder:
        # What a system leaves there, such as Ray's session folder, goes with ours.
        environment = {**os.environ, "TMPDIR": folder, "PYTHONPATH": pythonpath}
        if python == sys.executable:
            inherited = os.environ.get("PYTHONPATH", "")
            environment["PYTHONPATH"] = f"{_HERE}{os.pathsep}{inherited}".rstrip(os.pathsep)
        script = str(_HERE / "systems" / f"{program}.py")
        argv = [python, script, "--duration-s", f"{duration_s}"]
        process = subprocess.Popen(
            [*argv, "--spawned-at", f"{time.monotonic()}"],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            answer, log = process.communicate(timeout=_PROGRAM_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise BenchError(f"{program} took longer than {_PROGRAM_TIMEOUT_S:g} s") from None
        finally:
            kill_all_descendants(_KILL_DEADLINE_S)
    if process.returncode != 0 or not answer:
        tail = "\n".join(log.decode(errors="replace").splitlines()[-_MAX_ERROR_LINES:])
        raise BenchError(f"{program} ended with status {process.returncode}:\n{tail}")
    facts: dict[str, Any] = json.loads(answer)
    return facts
