"""How tests start the actors of tests/process/programs/actors.py."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy

PROGRAMS = Path(__file__).parents[2] / "process/programs"

SOON = RestartPolicy(mode="on_failure", max_restarts=2, backoff_initial_s=0.02)
NEVER = RestartPolicy(mode="never")


_numbers = itertools.count()


def actor(class_name: str, name: str = "", **fields: Any) -> ActorSpec:
    """A spec of one of the test actors, by default with a name that no other has.

    Restarts come quickly by default.
    """
    fields.setdefault("restart", SOON)
    fields.setdefault("start_timeout_s", 20.0)
    return ActorSpec(
        name=name or f"actor-{next(_numbers)}",
        target=f"actors:{class_name}",
        sys_path=(str(PROGRAMS),),
        **fields,
    )
