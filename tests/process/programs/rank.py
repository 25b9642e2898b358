"""One rank of a job, for tests: python rank.py RUN_DIR SCENARIO [RANK]

Rank 0 spawns an actor; all ranks meet there, each saying so with a line {"event": "met"} on its
standard output. What follows depends on the scenario; RANK names the one it is about:

- leave: all leave
- block: all block in a call, until the job fails: {"event": "failed", "message"}, exit status 3
- raise: RANK raises, the others block
- raise-once: the same in the job's first incarnation; later ones leave
- early: RANK leaves, the others meet again a while later and leave
- pause: all meet again after four seconds and leave
- absent: RANK never attaches; the others wait ten seconds for it
- late: RANK attaches a while after the others have left
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy
from umbra.runtime.errors import ActorDied, JobFailed
from umbra.runtime.session.launch import SessionConfig
from umbra.runtime.session.session import Session

AFTER_A_WHILE_S = 0.7


def main() -> None:
    run_dir, scenario = Path(sys.argv[1]), sys.argv[2]
    chosen = len(sys.argv) > 3 and os.environ["RANK"] == sys.argv[3]
    say(event="started", pid=os.getpid(), at=time.monotonic())
    if scenario == "late" and chosen:
        time.sleep(AFTER_A_WHILE_S)
    if scenario == "absent" and chosen:
        signal.pause()
    attach_timeout_s = 10.0 if scenario == "absent" else 60.0
    config = SessionConfig(run_dir=run_dir, attach_timeout_s=attach_timeout_s)
    try:
        with Session.from_torchrun(config) as session:
            take_part(session, scenario, chosen)
    except (JobFailed, ActorDied) as error:
        say(event="failed", message=str(error), at=time.monotonic())
        sys.exit(3)


def take_part(session: Session, scenario: str, chosen: bool) -> None:
    if scenario == "late":
        return
    if session.rank == 0:
        folder = str(Path(__file__).parent)
        restart = RestartPolicy(max_restarts=1, backoff_initial_s=0.02)
        for name, target in (("meeting", "actors:Meeting"), ("echo", "actors:Echo")):
            session.spawn(ActorSpec(name=name, target=target, sys_path=(folder,), restart=restart))
    meeting = session.actor("meeting", timeout_s=60.0)
    meeting.call("arrive", "first", session.world_size, timeout_s=60.0)
    say(event="met", incarnation=session.incarnation)
    is_first = session.incarnation == 1
    if scenario in ("raise", "raise-once") and chosen and is_first:
        raise ValueError("loss is NaN")
    if scenario == "early" and not chosen:
        time.sleep(AFTER_A_WHILE_S)
        meeting.call("arrive", "second", session.world_size - 1, timeout_s=60.0)
        say(event="met again")
    if scenario == "pause":
        time.sleep(4.0)
        meeting.call("arrive", "second", session.world_size, timeout_s=60.0)
        say(event="met again")
    if scenario in ("block", "raise") or (scenario == "raise-once" and is_first):
        meeting.call("arrive", "never", 10**6, timeout_s=60.0)


def say(**fields: object) -> None:
    # One write: torchrun starts ranks with -u, and print would then write the newline by itself.
    sys.stdout.write(json.dumps({"rank": int(os.environ["RANK"]), **fields}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
