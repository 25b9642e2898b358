"""A program that owns a session: python owner.py RUN_DIR

It starts an actor with a family (a child, a daemon), prints one JSON line with every pid and the
socket directory, and waits for a line on stdin: then it leaves the session.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.process.descendants import child_pids
from umbra.runtime.session.launch import SessionConfig
from umbra.runtime.session.session import Session


def main() -> None:
    config = SessionConfig(run_dir=Path(sys.argv[1]), shutdown_grace_s=2.0)
    with Session.from_torchrun(config) as session:
        spec = ActorSpec(
            name="parent", target="actors:Echo", sys_path=(str(Path(__file__).parent),)
        )
        parent = session.spawn(spec)
        family = parent.call("fork_family")
        (guardian,) = child_pids(os.getpid())
        (supervisor,) = child_pids(guardian)
        report = {
            "owner": os.getpid(),
            "guardian": guardian,
            "supervisor": supervisor,
            "actor": parent.call("who")["pid"],
            "child": family[0],
            "daemon": family[1],
            "socket_dir": str(session.socket_dir),
        }
        print(json.dumps(report), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
