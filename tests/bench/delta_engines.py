"""Simulated engines for the benchmark of deltas, many to a process.

`python tests/bench/delta_engines.py FOLDER FIRST COUNT PARENT_PID`. Each has a socket
of its own and speaks the engine protocol as far as a rollout manager uses it. The tokens are made
in advance; what a tick costs is a few numpy calls, so that many engines can share a process without
holding up the manager that is measured.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import uvloop
import zmq
from numpy.typing import NDArray

from umbra.runtime.process.prctl import die_with_parent
from umbra.runtime.rpc.actor_ref import ActorRef
from umbra.runtime.rpc.rpc_server import ActorServer

TICK_S: Final = 0.05
_MAX_BATCH_TOKENS: Final = 1 << 16
# Batches a manager may be behind; an engine that is not read for so long is a failure.
_MAX_QUEUED: Final = 10_000

Pace = Literal["paused", "tick", "full"]


def ref(idx: int, folder: Path) -> ActorRef:
    endpoint = f"ipc://{folder}/e{idx}"
    return ActorRef(name=f"e{idx}", incarnation=1, node_id="here", ipc_endpoint=endpoint)


class SimulatedEngine:
    """Gives every request 2 or 3 tokens a tick; ends it at its budget.

    Args:
        phase_s: how long after a common beat its ticks come.
    """

    def __init__(self, phase_s: float) -> None:
        self._phase_s = phase_s
        self._pace: Pace = "paused"
        self._ids = np.zeros(0, np.int64)
        self._positions = np.zeros(0, np.int32)
        self._left = np.zeros(0, np.int32)
        self._tokens = np.random.default_rng(0).integers(1, 2**15, _MAX_BATCH_TOKENS, np.int32)
        self._logprobs = np.full(_MAX_BATCH_TOKENS, -1.0, np.float32)
        self._num_ticks = 0
        self._ready: deque[dict[str, Any]] = deque()
        self._changed = asyncio.Event()
        self._made_at: list[float] = []

    def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        ids = np.asarray([request["id"] for request in requests], np.int64)
        positions = np.asarray([request["position"] for request in requests], np.int32)
        left = np.asarray([request["max_new_tokens"] for request in requests], np.int32)
        self._ids = np.concatenate([self._ids, ids])
        self._positions = np.concatenate([self._positions, positions])
        self._left = np.concatenate([self._left, left])
        self._changed.set()

    def abort(self, request_ids: Sequence[int]) -> None:
        self._keep(~np.isin(self._ids, np.asarray(request_ids)))

    def set_pace(self, pace: Pace) -> None:
        """How often a batch is made: never, every tick, or whenever the manager takes one."""
        self._pace = pace
        self._changed.set()

    def num_requests(self) -> int:
        return len(self._ids)

    def made_at(self) -> NDArray[np.float64]:
        """Monotonic time at which each batch of the stream so far was made."""
        return np.asarray(self._made_at)

    async def deltas(self) -> AsyncGenerator[dict[str, Any], None]:
        self._made_at.append(time.monotonic())
        yield self._batch(np.zeros(0, np.bool_))
        while True:
            if self._pace == "full" and len(self._ids):
                self._make()
                await asyncio.sleep(0)
            while not self._ready:
                self._changed.clear()
                await self._changed.wait()
                if self._pace == "full" and len(self._ids):
                    self._make()
            yield self._ready.popleft()

    async def tick(self) -> None:
        """Makes batches while the pace is "tick". For ever."""
        next_s = (time.monotonic() // TICK_S + 1) * TICK_S + self._phase_s
        while True:
            await asyncio.sleep(next_s - time.monotonic())
            next_s = max(next_s + TICK_S, time.monotonic())
            if self._pace == "tick" and len(self._ids):
                self._make()
                self._changed.set()

    def _make(self) -> None:
        assert len(self._ready) < _MAX_QUEUED, "the manager does not read"
        self._ready.append(self._batch(np.ones(len(self._ids), np.bool_)))
        self._made_at.append(time.monotonic())

    def _batch(self, wanted: NDArray[np.bool_]) -> dict[str, Any]:
        """The next tokens of some requests."""
        self._num_ticks += 1
        ids, positions = self._ids[: len(wanted)], self._positions[: len(wanted)]
        counts = np.minimum(2 + (ids + self._num_ticks) % 2, self._left[: len(wanted)])
        offsets = np.zeros(len(ids) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        batch: dict[str, Any] = {
            "ids": ids,
            "positions": positions.copy(),
            "offsets": offsets,
            "tokens": self._tokens[: offsets[-1]],
            "logprobs": self._logprobs[: offsets[-1]],
            "versions": np.zeros(len(ids), np.int64),
        }
        positions += counts.astype(np.int32)
        self._left[: len(wanted)] -= counts.astype(np.int32)
        finished = self._left[: len(wanted)] == 0
        batch["finished_ids"] = ids[finished]
        batch["finish_reasons"] = ["length"] * int(np.count_nonzero(finished))
        if finished.any():
            self._keep(self._left > 0)
        return batch

    def _keep(self, wanted: NDArray[np.bool_]) -> None:
        self._ids = self._ids[wanted]
        self._positions = self._positions[wanted]
        self._left = self._left[wanted]


async def _serve(folder: Path, first: int, count: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    async with asyncio.TaskGroup() as tasks:
        for idx in range(first, first + count):
            engine = SimulatedEngine(TICK_S * (idx - first) / count)
            server = ActorServer(engine, 1)
            server.bind(context.socket(zmq.ROUTER), ref(idx, folder).ipc_endpoint)
            tasks.create_task(server.run())
            tasks.create_task(engine.tick())
        print("ready", flush=True)


def main() -> None:
    folder, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    die_with_parent(int(sys.argv[4]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(folder, first, count))


if __name__ == "__main__":
    main()
