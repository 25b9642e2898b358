"""Engines simulated in discrete events, under the real dispatcher and any routing policy.

A step of an engine takes base_s + request_s * n with n requests running and gives each of them a
token. A large base_s is a GPU bound by memory, a large request_s one engine of few CPU cores.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from rollout_samples import make_trajectory

from umbra.runtime.engine_api.token_deltas import DeltaBatch
from umbra.runtime.errors import UmbraError
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher
from umbra.runtime.rollout.dispatch.router import EngineId, Router
from umbra.runtime.rollout.dispatch.trajectory import Group, Turn
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.rollout_config import SamplingOptions

GROUP_SIZE: Final = 8
CAP: Final = 2048
TICK_S: Final = 0.5
_BURST: Final = 4  # steps simulated at once; a request that comes meanwhile waits for their end
STOP: Final = 0


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    base_s: float
    request_s: float
    slots: int = 32
    slowness: float = 1.0
    joins_s: float = 0.0
    leaves_s: float = float("inf")

    def step_s(self, num_running: int) -> float:
        return self.slowness * (self.base_s + self.request_s * num_running)


@dataclass(frozen=True)
class Result:
    """Results of one simulated run. Idle: the share of the engines' time without a request."""

    makespan_s: float
    idle_share: float
    tokens: dict[str, int]


class Simulation:
    """Runs groups of requests of these lengths; at most `max_open` requests are open at a time."""

    def __init__(
        self,
        router: Router,
        engines: Sequence[EngineKind],
        lengths: Sequence[int],
        max_open: int,
    ) -> None:
        self.now = 0.0
        self.lengths = list(lengths)
        self.dispatcher = Dispatcher(
            router, self._fail, Recorder(None, self._fail), clock=lambda: self.now
        )
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._todo = deque(
            range(start, start + GROUP_SIZE) for start in range(0, len(lengths), GROUP_SIZE)
        )
        self.groups: list[Group] = []
        self._max_open = max_open
        self._num_open = self._num_ended = 0
        self._engines = [
            SimulatedEngine(self, EngineId(f"e{idx}", 1), kind) for idx, kind in enumerate(engines)
        ]

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def run(self) -> Result:
        for engine in self._engines:
            self.at(engine.kind.joins_s, engine.join)
            if engine.kind.leaves_s < float("inf"):
                self.at(engine.kind.leaves_s, engine.leave)
        self.at(0.0, self._admit)
        while self._num_ended < len(self.lengths):
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.dispatcher.check_integrity()
        present = sum(
            min(self.now, engine.kind.leaves_s) - min(self.now, engine.kind.joins_s)
            for engine in self._engines
        )
        busy = sum(engine.busy_s for engine in self._engines)
        tokens = {engine.engine.name: engine.num_tokens for engine in self._engines}
        return Result(self.now, 1 - busy / present, tokens)

    def _admit(self) -> None:
        while self._todo and self._num_open + GROUP_SIZE <= self._max_open:
            self._num_open += GROUP_SIZE
            self._submit_group(self._todo.popleft())

    def _submit_group(self, places: Iterable[int]) -> None:
        samples = [
            make_trajectory([1], sample_id=f"s{idx}", seed=idx, budget=CAP, max_context_len=CAP + 1)
            for idx in places
        ]
        group = Group("g", samples)
        self.groups.append(group)
        for sample in samples:
            self.dispatcher.submit(
                Turn(
                    trajectory=sample,
                    group=group,
                    start=0,
                    limit=CAP,
                    sampling=SamplingOptions(temperature=1.0, stop_token_ids=[STOP]),
                    on_end=self._on_end,
                )
            )

    def _on_end(self, turn: Turn, _reason: str) -> None:
        assert turn.trajectory.completion_len == self.lengths[turn.trajectory.seed]
        self._num_ended += 1
        self._num_open -= 1
        self.at(self.now, self._admit)

    def _fail(self, error: UmbraError) -> None:
        raise error


@dataclass
class _Running:
    request_id: int
    position: int
    num_left: int
    num_unsent: int = 0


class SimulatedEngine:
    """Takes requests as an engine link does; works in steps."""

    def __init__(self, simulation: Simulation, engine: EngineId, kind: EngineKind) -> None:
        self.engine = engine
        self.kind = kind
        self.busy_s = 0.0
        self.num_tokens = 0
        self._simulation = simulation
        self._waiting: deque[dict[str, Any]] = deque()
        self._running: list[_Running] = []
        self._ended: list[_Running] = []  # and not yet reported
        self._is_stepping = False
        self._is_gone = False
        self._next_flush_s = 0.0

    def join(self) -> None:
        self._simulation.dispatcher.attach(self.engine, self)
        self._simulation.dispatcher.set_serving(self.engine, True)

    def leave(self) -> None:
        """It dies; tokens since the last tick are lost."""
        self._is_gone = True
        self._simulation.dispatcher.detach(self.engine)

    def send(self, request: dict[str, Any]) -> None:
        self._waiting.append(request)
        if not self._is_stepping:
            self._begin_steps()

    def withdraw(self, request_ids: list[int]) -> None:
        gone = set(request_ids)
        self._waiting = deque(r for r in self._waiting if r["id"] not in gone)
        self._running = [r for r in self._running if r.request_id not in gone]

    def _begin_steps(self) -> None:
        while self._waiting and len(self._running) < self.kind.slots:
            request = self._waiting.popleft()
            length = self._simulation.lengths[int(request["seed"])]
            position = int(request["position"])
            self._running.append(_Running(int(request["id"]), position, length - position))
        self._is_stepping = bool(self._running)
        if self._running:
            num_steps = min(_BURST, min(running.num_left for running in self._running))
            burst_s = num_steps * self.kind.step_s(len(self._running))
            self._simulation.at(
                self._simulation.now + burst_s, lambda: self._end_steps(num_steps, burst_s)
            )

    def _end_steps(self, num_steps: int, burst_s: float) -> None:
        if self._is_gone:
            return
        self.busy_s += burst_s
        for running in self._running:
            running.num_left -= num_steps
            running.num_unsent += num_steps
        self.num_tokens += num_steps * len(self._running)
        self._ended += [running for running in self._running if not running.num_left]
        self._running = [running for running in self._running if running.num_left]
        if self._simulation.now >= self._next_flush_s or not self._running:
            self._flush()
        self._begin_steps()

    def _flush(self) -> None:
        """Once a tick, as engines do."""
        self._next_flush_s = self._simulation.now + TICK_S
        sent = [running for running in self._running + self._ended if running.num_unsent]
        counts = [running.num_unsent for running in sent]
        bounds = list(itertools.accumulate(counts, initial=0))
        tokens = np.ones(bounds[-1], np.int32)
        for idx, running in enumerate(sent):
            if running.num_left == 0:
                tokens[bounds[idx + 1] - 1] = STOP
        batch = DeltaBatch(
            ids=np.asarray([running.request_id for running in sent], np.int64),
            positions=np.asarray([running.position for running in sent], np.int64),
            bounds=np.asarray(bounds, np.int64),
            versions=np.ones(len(sent), np.int64),
            tokens=tokens,
            logprobs=np.zeros(len(tokens), np.float32),
            finishes=[(r.request_id, "stop") for r in sent if r.num_left == 0],
        )
        for running in sent:
            running.position += running.num_unsent
            running.num_unsent = 0
        self._ended = []
        self._simulation.dispatcher.on_batch(self.engine, batch)


class RoundRobin(Router):
    """One after the other, whatever they hold."""

    _last: EngineId | None = None

    def choose(self, cost: int, prefer: object = ()) -> EngineId | None:
        free = [engine for engine in self.serving if self.capacity_left(engine) > 0]
        later = [engine for engine in free if self._last is not None and engine > self._last]
        self._last = next(iter(later or free), None)
        return self._last


class LeastRequests(Router):
    """The engine that holds the fewest requests."""

    def choose(self, cost: int, prefer: object = ()) -> EngineId | None:
        free = [engine for engine in self.serving if self.capacity_left(engine) > 0]
        return min(free, key=lambda engine: (-self.capacity_left(engine), engine), default=None)


def lower_bound_s(engines: Sequence[EngineKind], lengths: Sequence[int], max_running: int) -> float:
    """No schedule is faster: all engines at the best speed that so many requests allow; nor
    does the longest request take less than alone on the fastest engine."""
    edges = sorted({0.0} | {e.joins_s for e in engines} | {e.leaves_s for e in engines})
    left, longest_s = float(sum(lengths)), 0.0
    for start, stop in itertools.pairwise([*edges, float("inf")]):
        present = [e for e in engines if e.joins_s <= start and e.leaves_s > start]
        speed = _best_tokens_per_s(present, max_running)
        if left <= speed * (stop - start):
            longest_s = max(lengths) * min(e.step_s(1) for e in engines)
            return max(start + left / speed, longest_s)
        left -= speed * (stop - start)
    raise AssertionError("the engines leave before the work is done")


def _best_tokens_per_s(engines: Sequence[EngineKind], max_running: int) -> float:
    """Each further request goes where it adds most: tokens a second are concave in requests."""

    def speed(engine: EngineKind, count: int) -> float:
        return count / engine.step_s(count) if count else 0.0

    counts = [0] * len(engines)
    for _ in range(max_running):
        gains = [
            speed(engine, count + 1) - speed(engine, count) if count < engine.slots else 0.0
            for engine, count in zip(engines, counts, strict=True)
        ]
        best = max(range(len(engines)), key=gains.__getitem__)
        if gains[best] <= 0:
            break
        counts[best] += 1
    return sum(speed(engine, count) for engine, count in zip(engines, counts, strict=True))
