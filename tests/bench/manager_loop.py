"""Time of what the rollout manager's loop does once per step or per sync.

    plan    `plan_batch` of groups whose samples have 4,000 tokens at the median, for 8 ranks and
            micro-batches of at most 16,384 tokens
    sync    every engine stops serving, then serves again, with requests that have begun and
            capacity for twice as many
    cancel  all turns that wait for an engine are cancelled, in groups of 8

Times are processor time in ms, the medians of five.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from umbra.runtime.engine_api.delta_batch import DeltaBatch
from umbra.runtime.rollout.buffer.batch_plan import plan_batch
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher
from umbra.runtime.rollout.dispatch.group import GroupShape
from umbra.runtime.rollout.dispatch.router import EngineId, Router
from umbra.runtime.rollout.dispatch.trajectory import Trajectory
from umbra.runtime.rollout.dispatch.turn import Turn
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.rollout.sampling_options import SamplingOptions

_PROMPT = Prompt("p", "", np.ones(16, np.int32), {})
_SAMPLING = SamplingOptions(temperature=1.0, stop_token_ids=[0])


class _Inbox:
    """Keeps what an engine was asked for."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def send(self, request: dict[str, Any]) -> None:
        self.requests.append(request)

    def withdraw(self, request_ids: list[int]) -> None:
        pass


def run_plan(num_groups: int, group_size: int) -> float:
    drawn = random.Random(1)

    def shape() -> GroupShape:
        lengths = [int(4000 * drawn.lognormvariate(0, 0.7)) for _ in range(group_size)]
        return GroupShape(500, [min(65_536, max(1, length)) for length in lengths])

    shapes = [shape() for _ in range(num_groups)]
    return _median_ms(lambda: plan_batch(shapes, 8, max_tokens_per_micro_batch=16_384))


def run_sync(num_engines: int, num_requests: int) -> float:
    dispatcher = _dispatcher(2 * num_requests)
    inboxes = {EngineId(f"engine-{idx}", 1): _Inbox() for idx in range(num_engines)}
    for engine, inbox in inboxes.items():
        dispatcher.attach(engine, inbox)
        dispatcher.set_serving(engine, True)
    for idx in range(num_engines * num_requests):
        dispatcher.submit(_turn(idx))
    for engine, inbox in inboxes.items():
        dispatcher.on_batch(engine, _first_tokens([asked["id"] for asked in inbox.requests]))

    def sync() -> None:
        for serving in (False, True):
            for engine in inboxes:
                dispatcher.set_serving(engine, serving)

    return _median_ms(sync)


def run_cancel(num_turns: int) -> float:
    dispatcher = _dispatcher(1)
    waiting: list[Turn] = []

    def submit() -> None:
        waiting[:] = [_turn(idx) for idx in range(num_turns)]
        for turn in waiting:
            dispatcher.submit(turn)

    def cancel() -> None:
        for first in range(0, num_turns, 8):
            dispatcher.cancel(waiting[first : first + 8])

    return _median_ms(cancel, before=submit)


def _dispatcher(max_inflight: int) -> Dispatcher:
    def fail(error: Exception) -> None:
        raise error

    return Dispatcher(Router(max_inflight), fail, Recorder(None, fail))


def _turn(idx: int) -> Turn:
    return Turn(
        trajectory=Trajectory(f"s{idx}", _PROMPT, idx, budget=512, max_context_len=4096),
        group=None,
        start=0,
        limit=512,
        sampling=_SAMPLING,
        on_end=lambda turn, reason: None,
    )


def _first_tokens(request_ids: list[int]) -> DeltaBatch:
    size = len(request_ids)
    return DeltaBatch.from_wire(
        {
            "ids": np.asarray(request_ids, np.int64),
            "positions": np.zeros(size, np.int32),
            "offsets": np.arange(size + 1, dtype=np.int32),
            "tokens": np.ones(size, np.int32),
            "logprobs": np.zeros(size, np.float32),
            "versions": np.zeros(size, np.int64),
            "finished_ids": np.zeros(0, np.int64),
            "finish_reasons": [],
        }
    )


def _median_ms(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    took_ms: list[float] = []
    for _ in range(5):
        before()
        began = time.process_time()
        work()
        took_ms.append((time.process_time() - began) * 1e3)
    return statistics.median(took_ms)


if __name__ == "__main__":
    for num_groups, group_size in ((16, 64), (16, 256), (16, 512), (4, 1024)):
        print(
            f"plan {num_groups} groups of {group_size}: {run_plan(num_groups, group_size):.1f} ms"
        )
    for num_engines, num_requests in ((64, 256), (256, 128), (512, 32)):
        took_ms = run_sync(num_engines, num_requests)
        print(f"sync {num_engines} engines of {num_requests} requests: {took_ms:.1f} ms")
    for num_turns in (8192, 32_768):
        print(f"cancel {num_turns} turns: {run_cancel(num_turns):.1f} ms")
