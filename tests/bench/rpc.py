"""The start of an actor and the echo of 100 bytes to it: umbra beside a bare socket and Ray.

Each round starts every system once, in a new interpreter; the order rotates. Per system, medians:

- `ready_s`: from the start of the services until they can start an actor
- `first_call_s`: from there to the first answered call; `first_call_from_exec_s` counts from the
  start of the interpreter
- `p50_us`, `p99_us`: sequential calls
- `calls_per_s`: calls with many in flight, in the fastest of several ways, which `idiom` names

umbra's and Ray's actors have a plain method. A system that is not installed is null.

    python tests/bench/rpc.py [--rounds 5] [--peer-python .venv-bench/bin/python] [--start-only]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from bench_report import BenchError, describe, median_of, options_parser, progress

from umbra.runtime.process.descendants import kill_all_descendants
from umbra.runtime.process.prctl import become_subreaper

_SYSTEMS: Final = {"umbra": "umbra", "bare_zmq": "zmq", "ray": "ray"}
"""System -> the module that its interpreter must have."""
_FOLDER: Final = Path(__file__).resolve().parent
_PEERS: Final = _FOLDER.parents[1] / ".venv-bench" / "bin" / "python"
_DURATION_S: Final = 0.6
"""Seconds of each measurement. A 99th percentile of Ray needs that many calls; longer, five rounds
take minutes."""
_TIMEOUT_S: Final = 120.0
_KILL_LIMIT_S: Final = 10.0


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument(
        "--peer-python",
        default=str(_PEERS) if _PEERS.exists() else sys.executable,
        metavar="PATH",
        help="interpreter that has Ray (default: the one of `make bench`, else this one)",
    )
    parser.add_argument("--start-only", action="store_true", help="measure no calls but the first")
    given = parser.parse_args()
    become_subreaper()
    pythons = dict.fromkeys(_SYSTEMS, sys.executable) | {"ray": given.peer_python}
    present = [name for name in _SYSTEMS if _has_module(pythons[name], _SYSTEMS[name])]
    duration_s = 0.0 if given.start_only else _DURATION_S
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in present}
    for idx in range(given.rounds):
        for name in present[idx % len(present) :] + present[: idx % len(present)]:
            progress(f"round {idx + 1} of {given.rounds}: {name}")
            rows[name].append(_run(name, pythons[name], duration_s))
    medians = dict.fromkeys(_SYSTEMS) | {name: median_of(rows[name]) for name in present}
    print(json.dumps({"rounds": given.rounds, **medians, **describe()}, indent=2))
    return 0


def _has_module(python: str, module: str) -> bool:
    look = f"import sys, importlib.util as u; sys.exit(u.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", look], capture_output=True, check=False).returncode == 0


def _run(name: str, python: str, duration_s: float) -> dict[str, Any]:
    """One system's facts; leaves no process behind."""
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as folder:
        program = [python, str(_FOLDER / "rpc_systems.py"), name]
        process = subprocess.Popen(
            [*program, str(time.monotonic()), str(duration_s)],
            env={**os.environ, "TMPDIR": folder},  # Ray's session folder goes with it
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            output = process.communicate(timeout=_TIMEOUT_S)[0]
        finally:
            kill_all_descendants(_KILL_LIMIT_S)
    if process.returncode:
        raise BenchError(f"{name} ended with status {process.returncode}; its error is above")
    return json.loads(output.splitlines()[-1])  # Ray prints, too


if __name__ == "__main__":
    sys.exit(main())
