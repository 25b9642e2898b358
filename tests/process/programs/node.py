"""A second node of a job, for tests: python node.py RUN_DIR NODE_ID

It has a session of its own that offers tcp on the loopback, spawns an actor named `remote`, prints
the actor's reference as one JSON line and waits for a line on stdin. Keys: UMBRA_SECRET_FILE.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.session.launch import SessionConfig
from umbra.runtime.session.session import Session


def main() -> None:
    config = SessionConfig(run_dir=Path(sys.argv[1]), node_id=sys.argv[2], tcp_host="127.0.0.1")
    with Session.from_torchrun(config) as session:
        folder = str(Path(__file__).parent)
        remote = session.spawn(ActorSpec(name="remote", target="actors:Echo", sys_path=(folder,)))
        print(json.dumps(asdict(remote.ref)), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
