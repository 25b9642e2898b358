"""The start of an actor and the echo of 100 bytes to it: umbra beside a bare socket and Ray.

Each round starts every system once, in a new interpreter; the order rotates. Per system, medians:

- `ready_s`: from the start of the services until they can start an actor
- `first_call_s`: from there to the first answered call; `first_call_from_exec_s` counts from the
  start of the interpreter
- `resident_mb`: memory of the processes beside the two that talk
- `p50_us`, `p99_us`: sequential calls
- `calls_per_s`: calls with many in flight, in the fastest of several ways, which `idiom` names

umbra's and Ray's actors have a plain method. `async_...` is umbra's `async def`. A system that is
not installed is null.

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

from bench_report import BenchError, describe_hardware, median_of, options_parser, progress

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
_MAX_ERROR_LINES: Final = 15


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
    errors: dict[str, str] = {}
    for idx in range(given.rounds):
        for name in present[idx % len(present) :] + present[: idx % len(present)]:
            if name in errors:
                continue
            progress(f"round {idx + 1} of {given.rounds}: {name}")
            try:
                rows[name].append(_run(name, pythons[name], duration_s))
            except BenchError as error:
                errors[name] = str(error)
    medians = {name: median_of(rows[name]) for name in present if name not in errors}
    result: dict[str, Any] = {
        "bench": "rpc",
        "hardware": describe_hardware(),
        "versions": {name: facts.pop("version") for name, facts in medians.items()},
        "rounds": given.rounds,
        **{name: medians.get(name) for name in _SYSTEMS},
    }
    print(json.dumps(result | ({"errors": errors} if errors else {}), indent=2))
    return 1 if "umbra" in errors else 0


def _has_module(python: str, module: str) -> bool:
    look = f"import sys, importlib.util as u; sys.exit(u.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", look], capture_output=True, check=False).returncode == 0


def _run(name: str, python: str, duration_s: float) -> dict[str, Any]:
    """One system's facts; leaves no process behind.

    Raises:
        BenchError: it failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as folder:
        program = [python, str(_FOLDER / "rpc_systems.py"), name]
        process = subprocess.Popen(
            [*program, str(time.monotonic()), str(duration_s)],
            env={**os.environ, "TMPDIR": folder},  # Ray's session folder goes with it
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            output, log = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise BenchError(f"{name} took longer than {_TIMEOUT_S:g} s") from None
        finally:
            kill_all_descendants(_KILL_LIMIT_S)
    if process.returncode or not output:
        tail = "\n".join(log.decode(errors="replace").splitlines()[-_MAX_ERROR_LINES:])
        raise BenchError(f"{name} ended with status {process.returncode}:\n{tail}")
    return json.loads(output.splitlines()[-1])  # Ray prints, too


if __name__ == "__main__":
    sys.exit(main())
