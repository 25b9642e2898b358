"""A job that starts fast and runs forever: each rank opens a session, rank 0 spawns an actor."""

from __future__ import annotations

from pathlib import Path

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.session.launch import SessionConfig
from umbra.runtime.session.session import Session


class Idle:
    """Does nothing."""


def main() -> None:
    with Session.from_torchrun(SessionConfig(run_dir=Path("run"))) as session:
        if session.rank == 0:
            folder = str(Path(__file__).parent)
            session.spawn(ActorSpec(name="idle", target="small_job:Idle", sys_path=(folder,)))
        while True:
            session.raise_if_lost(within_s=60.0)


if __name__ == "__main__":
    main()
