"""One rank of a job, for tests: python pool_rank.py RUN_DIR

Rank 0 makes a pool with an echo engine on each of two nodes. Every rank says when both serve, and
whenever a restarted one serves again. Then the pool sleeps. Once an engine is dead, both ranks
leave.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rank import say

from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rpc.sync_handle import Pool
from umbra.runtime.session.launch import SessionConfig
from umbra.runtime.session.session import Session

LIMIT_S = 30.0


def main() -> None:
    with Session.from_torchrun(SessionConfig(run_dir=Path(sys.argv[1]))) as session:
        if session.rank == 0:
            session.create_pool(
                PoolSpec(
                    name="pool",
                    engine="echo",
                    count=2,
                    mode="hybrid",
                    kwargs={"model_path": "", "vocab_size": 64},
                    load_weights=True,
                    engine_nodes=(0, 1),
                    restart=RestartPolicy(backoff_initial_s=0.02),
                )
            )
            folder = str(Path(__file__).parent)
            spec = ActorSpec(name="meeting", target="actors:Meeting", sys_path=(folder,))
            session.spawn(spec)
        meeting = session.actor("meeting")  # the pool is there, too
        pool = session.pool("pool")
        wait_serving(pool, num_restarts=0)
        say(event="serving", supervisors=[node.tcp_endpoint for node in session.nodes])
        wait_serving(pool, num_restarts=1)
        say(event="serving again")
        meeting.call("arrive", "served", 2)
        if session.rank == 0:
            pool.sleep(level=1)
            say(event="asleep")
        wait_for(pool, lambda states: any(state["state"] == "DEAD" for state in states))
        meeting.call("arrive", "end", 2)


def wait_serving(pool: Pool, num_restarts: int) -> None:
    """Waits until both engines serve, and have been restarted so often in all."""
    wait_for(
        pool,
        lambda states: (
            len(states) == 2
            and all(state["state"] == "SERVING" for state in states)
            and sum(state["num_restarts"] for state in states) == num_restarts
        ),
    )


def wait_for(pool: Pool, is_so: Callable[[list[dict[str, Any]]], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so(states := pool.states()):
        assert time.monotonic() < deadline, states
        time.sleep(0.02)


if __name__ == "__main__":
    main()
