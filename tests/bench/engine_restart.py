"""The time that umbra adds to an engine's own start-up when it is killed while it generates.

The pool has one engine with 32 trajectories in flight. A rank publishes the weights again as soon
as the next engine waits for them. Prints JSON, medians of the kills, in seconds:

- `kill_to_end_s`: from SIGKILL until the kernel has ended the actor's process
- `end_to_spawn_s`: from there until its other processes are gone and the next engine is started,
  with a backoff of 0.1 s
- `start_s`: from there until it is up: imports, model, compilation
- `ready_to_token_s`: from there to its first token at the manager; `sync_s` of it is a weight sync
- `added_s`: `end_to_spawn_s` and `ready_to_token_s`; `added_max_s` of the slowest kill

    .venv-vllm/bin/python tests/bench/engine_restart.py --engine vllm [--kills 5]
    python tests/bench/engine_restart.py --engine sglang --device cuda [--engine-args JSON]
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gap_manager import gap_manager_spec
from qwen3_shapes import SHAPES, save_model

from umbra.runtime.actor.actor_spec import RestartPolicy
from umbra.runtime.engine_api.engine_names import engine_target
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.process.descendants import wait_for_exits
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.launch import SessionConfig
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher

DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
SHAPE = {**SHAPES["tiny"], "hidden_size": 128, "intermediate_size": 256}
NUM_TRAJECTORIES, PROMPT_LEN, NUM_NEW_TOKENS = 32, 32, 400
MAX_CONTEXT_LEN = 512
TIMEOUT_S = 300.0


def wait_for(what: Callable[[], bool]) -> float:
    """The time at which it is so."""
    deadline = time.monotonic() + TIMEOUT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return time.monotonic()


def start(session: Session, given: argparse.Namespace, folder: Path) -> SyncHandle:
    """Pool and manager, which keeps the trajectories in flight."""
    own = {} if given.engine == "embedded" else {"engine_args": given.engine_args}
    session.create_pool(
        PoolSpec(
            name="policy",
            engine=engine_target(given.engine),
            count=1,
            mode="standalone",
            restart=RestartPolicy(max_restarts=20, backoff_max_s=0.1),
            kwargs={
                "model_path": str(folder),
                "max_context_len": MAX_CONTEXT_LEN,
                "max_num_seqs": 64,
                "kv_cache_num_tokens": 64 * MAX_CONTEXT_LEN,
                "dtype": DTYPES[given.device],
                "device": given.device,
                **own,
            },
            env={"OMP_NUM_THREADS": "1"},
        )
    )
    return session.spawn(gap_manager_spec("policy", PROMPT_LEN, NUM_NEW_TOKENS))


def kill_once(
    session: Session, manager: SyncHandle, publisher: WeightPublisher, life: int
) -> dict[str, float]:
    """Kills incarnation number `life` and waits until the next one generates."""

    def pid() -> int:
        rows = session.supervisor_call("list_actors")
        return next(row["pid"] for row in rows if row["name"] == "policy-0")

    def is_ready() -> bool:
        (state,) = session.supervisor_call("pool_states", "policy")
        return state["incarnation"] == life + 1 and state["state"] == "PENDING_WEIGHTS"

    old_pid = pid()
    killed = time.monotonic()
    os.kill(old_pid, signal.SIGKILL)
    wait_for_exits([old_pid], TIMEOUT_S)
    ended = time.monotonic()
    spawned = wait_for(lambda: pid() != old_pid)
    ready = wait_for(is_ready)
    publisher.publish("policy", 0, TIMEOUT_S)
    synced = time.monotonic()
    first_token = max(manager.call("first_tokens", 0, life + 1, timeout_s=TIMEOUT_S))
    return {
        "kill_to_end_s": ended - killed,
        "end_to_spawn_s": spawned - ended,
        "start_s": ready - spawned,
        "sync_s": synced - ready,
        "ready_to_token_s": first_token - ready,
        "added_s": spawned - ended + first_token - ready,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=["embedded", "vllm", "sglang"], default="embedded")
    parser.add_argument("--device", choices=sorted(DTYPES), default="cpu")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON")
    parser.add_argument("--kills", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as name:
        folder = Path(name)
        model = save_model(folder, SHAPE, "float32")
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        config = SessionConfig(run_dir=folder / "run")
        with Session.from_torchrun(config, on_note=lambda text: None) as session:
            manager = start(session, given, folder)
            publisher = WeightPublisher(session, weights)
            publisher.publish("policy", 0, TIMEOUT_S)
            manager.call("keep_in_flight", NUM_TRAJECTORIES)
            manager.call("first_tokens", 0, 1, timeout_s=TIMEOUT_S)
            rows: list[dict[str, Any]] = [
                kill_once(session, manager, publisher, life) for life in range(1, given.kills + 1)
            ]
            publisher.close()
    facts = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    facts["added_max_s"] = max(row["added_s"] for row in rows)
    print(json.dumps({key: round(value, 3) for key, value in facts.items()}))


if __name__ == "__main__":
    main()
