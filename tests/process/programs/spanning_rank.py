"""One rank of a job, for tests: python spanning_rank.py RUN_DIR MODEL_DIR

Rank 0 makes a pool with one vLLM engine on two nodes, a worker on each. Both ranks publish versions
of the model, and rank 0 says which tokens the engine generates with each. Before some versions the
engine has to be killed; both ranks leave after the last.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from model_factory import make_model
from process_runs import greedy
from rank import say

from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy
from umbra.runtime.cluster.placement import EngineGpus, FollowerPlace
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.session.launch import SessionConfig
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher

START_LIMIT_S = 600.0
"""Three processes of an engine import vLLM one after the other, which takes 10 s each, and a minute
on a loaded machine."""
RESTARTS_BEFORE = {1: 0, 2: 0, 3: 1, 4: 2}
"""Of the engine, by version."""


def main() -> None:
    with Session.from_torchrun(SessionConfig(run_dir=Path(sys.argv[1]))) as session:
        if session.rank == 0:
            session.create_pool(policy(sys.argv[2]))
            folder = str(Path(__file__).parent)
            session.spawn(ActorSpec(name="meeting", target="actors:Meeting", sys_path=(folder,)))
        meeting = session.actor("meeting", timeout_s=START_LIMIT_S)  # the pool is there, too
        for version, num_restarts in RESTARTS_BEFORE.items():
            ref = wait_ready(session, num_restarts)
            meeting.call("arrive", f"version {version}", 2, timeout_s=START_LIMIT_S)
            transport = publish(session, version)
            if session.rank == 0:
                tokens = greedy(session.connect(ref), timeout_s=60.0)
                say(event=f"version {version}", tokens=tokens, transport=transport)
        meeting.call("arrive", "end", 2, timeout_s=START_LIMIT_S)  # a follower is on rank 1's node


def policy(model_path: str) -> PoolSpec:
    return PoolSpec(
        name="policy",
        engine="vllm",
        count=1,
        mode="standalone",
        kwargs={
            "model_path": model_path,
            "dtype": "float32",
            "device": "cpu",
            "max_context_len": 512,
            "max_num_seqs": 16,
            "tick_ms": 5.0,
            "engine_args": {"tensor_parallel_size": 2},
        },
        engine_nodes=(0,),
        engine_followers=((FollowerPlace(node=1, gpus=EngineGpus(own=())),),),
        restart=RestartPolicy(backoff_initial_s=0.02),
        start_timeout_s=START_LIMIT_S,
        busy_limit_s=START_LIMIT_S,
        hung_limit_s=120.0,  # of a healthy process on a loaded machine
    )


def wait_ready(session: Session, num_restarts: int) -> Any:
    """Waits until the engine runs after so many restarts; returns its address."""
    pool = session.pool("policy")
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        (state,) = pool.states()
        is_ready = state["state"] in ("PENDING_WEIGHTS", "SERVING")
        if is_ready and state["num_restarts"] == num_restarts:
            return state["ref"]
        assert time.monotonic() < deadline, state
        time.sleep(0.1)


def publish(session: Session, version: int) -> str:
    """Sends the version's weights to the engine; returns the transport."""
    weights = dict(make_model("qwen3", version).named_parameters())
    publisher = WeightPublisher(session, weights)
    with closing(publisher):
        return publisher.publish("policy", version, 120.0).transport


if __name__ == "__main__":
    main()
