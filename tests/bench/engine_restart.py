"""The time that umbra adds to an engine's own start-up when it is killed while it generates.

The pool has one engine with 32 trajectories in flight. A rank publishes the weights again as soon
as the next engine waits for them. Prints JSON, medians of the kills, in seconds:

- `end_to_spawn_s`: from the end of the actor's process until its other processes are gone and the
  next engine is started, with a backoff of 0.1 s
- `start_s`: from there until it is up: imports, model, compilation
- `ready_to_token_s`: from there, with a weight sync, to its first token at the manager
- `added_s`: `end_to_spawn_s` and `ready_to_token_s`; `added_max_s` of the slowest kill

    .venv-vllm/bin/python tests/bench/engine_restart.py --engine vllm [--kills 5]
    python tests/bench/engine_restart.py --engine sglang --device cuda [--engine-args JSON]
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench_report import median_of
from qwen3_shapes import SHAPES, save_model

from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy, actor_context
from umbra.runtime.engine_api.engine_names import engine_target
from umbra.runtime.engine_api.token_deltas import DeltaBatch
from umbra.runtime.errors import UmbraError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.process.descendants import wait_for_exits
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher
from umbra.runtime.rollout.dispatch.engine_fleet import Fleet
from umbra.runtime.rollout.dispatch.router import EngineId, Router
from umbra.runtime.rollout.dispatch.trajectory import Trajectory, Turn
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.rollout.rollout_config import DispatchConfig, SamplingOptions
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.launch import SessionConfig
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher

DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
NUM_TRAJECTORIES, PROMPT_LEN, NUM_NEW_TOKENS = 32, 32, 400
MAX_CONTEXT_LEN = 512
POOL = "policy"
TIMEOUT_S = 300.0


class TokenManager:
    """An actor: the parts of a rollout manager between the engines and the trajectories."""

    def __init__(self) -> None:
        config = DispatchConfig(pool=POOL, max_context_len=MAX_CONTEXT_LEN)
        self._prompt = Prompt("p", "prompt", np.arange(1, PROMPT_LEN + 1, dtype=np.int32), {})
        router = Router(config.max_inflight_per_engine, config.max_running_per_engine)
        self._dispatcher = _NotingDispatcher(router, _fail, Recorder(None, _fail))
        self._fleet = Fleet(config, actor_context(), self._dispatcher, lambda text: None)
        self._num_begun = 0

    async def run(self) -> None:
        await self._fleet.run(lambda: None)

    def keep_in_flight(self, count: int) -> None:
        """Gives the pool `count` trajectories for ever."""
        for _ in range(count):
            self._submit()

    async def first_token(self, incarnation: int) -> float:
        """Monotonic time at which the first token of an engine's incarnation was applied."""
        while len(self._dispatcher.came_at) < incarnation:
            self._dispatcher.changed.clear()
            await self._dispatcher.changed.wait()
        return max(self._dispatcher.came_at.values())

    def _submit(self) -> None:
        self._num_begun += 1
        sample = Trajectory(
            f"s{self._num_begun}",
            self._prompt,
            self._num_begun,
            # of every length, so that they do not end together
            budget=1 + self._num_begun * 37 % NUM_NEW_TOKENS,
            max_context_len=MAX_CONTEXT_LEN,
        )
        self._dispatcher.submit(
            Turn(
                trajectory=sample,
                group=None,
                start=0,
                limit=sample.budget,
                sampling=SamplingOptions(temperature=1.0, stop_token_ids=[]),
                on_end=lambda _turn, _reason: self._submit(),
            )
        )


class _NotingDispatcher(Dispatcher):
    def __init__(self, router: Router, on_failure: Any, recorder: Recorder) -> None:
        super().__init__(router, on_failure, recorder)
        self.came_at: dict[EngineId, float] = {}
        self.changed = asyncio.Event()

    def on_batch(self, engine: EngineId, batch: DeltaBatch) -> None:
        super().on_batch(engine, batch)
        if len(batch.tokens):
            self.came_at.setdefault(engine, time.monotonic())
            self.changed.set()


def _fail(error: UmbraError) -> None:
    raise error


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
            name=POOL,
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
    target, own_folder = "engine_restart:TokenManager", str(Path(__file__).parent)
    return session.spawn(ActorSpec(name="rollouts", target=target, sys_path=(own_folder,)))


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
    os.kill(old_pid, signal.SIGKILL)
    wait_for_exits([old_pid], TIMEOUT_S)
    ended = time.monotonic()
    spawned = wait_for(lambda: pid() != old_pid)
    ready = wait_for(is_ready)
    publisher.publish("policy", 0, TIMEOUT_S)
    first_token = manager.call("first_token", life + 1, timeout_s=TIMEOUT_S)
    return {
        "end_to_spawn_s": spawned - ended,
        "start_s": ready - spawned,
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
        model = save_model(folder, SHAPES["tiny"], "float32")
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        config = SessionConfig(run_dir=folder / "run")
        with Session.from_torchrun(config, on_note=lambda text: None) as session:
            manager = start(session, given, folder)
            publisher = WeightPublisher(session, weights)
            publisher.publish("policy", 0, TIMEOUT_S)
            manager.call("keep_in_flight", NUM_TRAJECTORIES)
            manager.call("first_token", 1, timeout_s=TIMEOUT_S)
            rows: list[dict[str, Any]] = [
                kill_once(session, manager, publisher, life) for life in range(1, given.kills + 1)
            ]
            publisher.close()
    added_max_s = round(max(row["added_s"] for row in rows), 3)
    print(json.dumps(median_of(rows, digits=3) | {"added_max_s": added_max_s}))


if __name__ == "__main__":
    main()
