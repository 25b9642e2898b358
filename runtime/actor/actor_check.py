"""Constructs an actor in a process of its own, without starting it, for `umbra doctor`.

    python -m umbra.runtime.actor.actor_check

Standard input has the actor's `ActorSpec`. The last line of standard output is a JSON object,
{"ok": text} or {"error": message}.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from typing import Any, Final

import msgpack

from umbra.runtime.actor.actor_spec import ActorSpec, make_target
from umbra.runtime.cluster.environment import without_rank
from umbra.runtime.errors import ActorError, UmbraError
from umbra.runtime.settings import from_wire, to_wire

_LIMIT_S: Final = 300.0
"""Covers the imports of an engine's library. A longer limit delays the report of one that hangs."""
_NUM_LINES: Final = 10


def check_actor(spec: ActorSpec) -> str:
    """The actor's report about itself. Raises ActorError with the message of a failed start."""
    # Files, not pipes: a process that the actor has started could hold a pipe open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            env={**without_rank(os.environ), **spec.env},
            start_new_session=True,
        )
        try:
            process.communicate(msgpack.packb(to_wire(spec)), timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise ActorError(f"{spec.name} was not constructed within {_LIMIT_S:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        errors.seek(0)
        lines, said = output.read().splitlines(), errors.read()
    try:
        outcome: dict[str, str] = json.loads(lines[-1])
    except (IndexError, ValueError):
        last_lines = said.decode(errors="replace").splitlines()[-_NUM_LINES:]
        raise ActorError(
            f"{spec.name} ended with status {process.returncode}: " + "\n".join(last_lines)
        ) from None
    if "error" in outcome:
        raise ActorError(outcome["error"])
    return outcome["ok"]


def _construct(spec: ActorSpec) -> dict[str, str]:
    sys.path[:0] = spec.sys_path
    try:
        target: Any = make_target(spec.target, spec.kwargs, spec.kwarg_settings)
        # Only an engine's: on other actors a method of that name may mean anything.
        check = getattr(target, "check_options", None) if spec.role == "engine" else None
        return {"ok": str(check()) if check else ""}
    except UmbraError as error:
        return {"error": str(error)}
    except Exception:  # noqa: BLE001 -- user code and libraries may raise anything
        return {"error": traceback.format_exc(limit=-3)}


if __name__ == "__main__":
    outcome = _construct(from_wire(ActorSpec, msgpack.unpackb(sys.stdin.buffer.read())))
    print("\n" + json.dumps(outcome), flush=True)
    os._exit(0)  # a library may have threads that keep the interpreter from ending
