"""Which turn is where, and what a delta, a finish or an engine's death does to it.

    submit -> waiting -> in flight on one engine -> on_end("stop" | "length")
                 ^              |
                 +--------------+  abort, error, lost tokens, death of the engine: the turn goes
                                   on from prompt + tokens so far, on any serving engine

Runs on one loop and never waits: links and fleet feed it events.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.errors import EngineError, UmbraError
from umbra.runtime.rollout.deltas import DeltaBatch
from umbra.runtime.rollout.router import EngineId, Router
from umbra.runtime.rollout.trajectory import Trajectory, TrajectoryState
from umbra.runtime.rollout.turn import Turn

logger = logging.getLogger(__name__)

# A turn that engines fail this often without a token in between is taken for the cause. Engines
# that die do not count.
_MAX_TURN_ERRORS: Final = 3


class RequestCarrier(Protocol):
    """What an engine link offers; both return at once."""

    def send(self, request: dict[str, Any]) -> None: ...

    def withdraw(self, request_ids: list[int]) -> None: ...


class Journal(Protocol):
    """Is told what happens to trajectories: `Recorder`."""

    def started(self, sample: Trajectory) -> None: ...

    def cut(self, sample: Trajectory) -> None: ...

    def on_tokens(
        self,
        uids: NDArray[np.int64],
        starts: NDArray[np.int64],
        offsets: NDArray[np.int64],
        versions: NDArray[np.int64],
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
    ) -> None: ...


class _Run(NamedTuple):
    """Tokens [begin, end) of a batch that were appended at `start` of a completion."""

    uid: int
    start: int
    begin: int
    end: int
    version: int


class Moved(NamedTuple):
    """What an engine held when it was lost."""

    num_trajectories: int
    num_tokens: int


class Dispatcher:
    """Gives turns to engines and applies what comes back.

    Args:
        router: chooses engines.
        on_failure: told of an error that no other engine would heal.
        clock: seconds, by which the speed of engines is measured.
    """

    def __init__(
        self,
        router: Router,
        on_failure: Callable[[UmbraError], None],
        journal: Journal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._journal = journal
        self._on_failure = on_failure
        self._clock = clock
        self._waiting: deque[Turn] = deque()  # bounded by what the manager admits
        self._carriers: dict[EngineId, RequestCarrier] = {}
        self._inflight: dict[EngineId, dict[int, Turn]] = {}
        self._request_ids = itertools.count(1)
        self.counters = dict.fromkeys(
            ("gaps", "repeats", "retries", "aborts", "engines_lost", "late_runs", "moved"), 0
        )

    def submit(self, turn: Turn) -> None:
        """Takes a turn; ends it at once where there is no room for a token."""
        outcome = turn.outcome()
        if outcome:
            turn.on_end(turn, outcome)
            return
        self._waiting.append(turn)
        self.pump()

    def cancel(self, turns: Iterable[Turn]) -> None:
        """Forgets turns wherever they are; engines stop working on them."""
        dropped = set(turns)
        self._waiting = deque(turn for turn in self._waiting if turn not in dropped)
        for engine, inflight in self._inflight.items():
            gone = [turn for turn in inflight.values() if turn in dropped]
            for turn in gone:
                self._take_back(engine, turn)
            if gone:
                self._carriers[engine].withdraw([turn.request_id for turn in gone])
        self.pump()

    def attach(self, engine: EngineId, carrier: RequestCarrier) -> None:
        """An engine can be reached; it takes turns once `set_serving` says so."""
        self._carriers[engine] = carrier
        self._inflight[engine] = {}
        self._router.set_serving(engine, False)

    def set_serving(self, engine: EngineId, serving: bool) -> None:
        if engine in self._carriers:
            self._router.set_serving(engine, serving)
            self.pump()
            if serving:
                self._take_over(engine)

    def detach(self, engine: EngineId) -> Moved:
        """The engine is lost: what it held goes on elsewhere, oldest first."""
        inflight = self._inflight.pop(engine, {})
        del self._carriers[engine]
        self._router.remove(engine)
        turns = list(inflight.values())
        for turn in reversed(turns):
            self._requeue(turn)
        self.pump()
        self.counters["engines_lost"] += 1
        return Moved(len(turns), sum(turn.trajectory.num_generated for turn in turns))

    def hand_back(self, engine: EngineId, request_ids: Iterable[int]) -> None:
        """The engine would not take these requests; it gets no others until its state changes."""
        self._router.set_serving(engine, False)
        inflight = self._inflight.get(engine, {})
        for turn in [inflight[rid] for rid in request_ids if rid in inflight]:
            self._take_back(engine, turn)
            self._requeue(turn)
        self.pump()

    def fail(self, error: UmbraError) -> None:
        self._on_failure(error)

    def num_inflight(self, engine: EngineId) -> int:
        return len(self._inflight.get(engine, ()))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def pump(self) -> None:
        """Gives waiting turns to engines while there is room."""
        while self._waiting:
            turn = self._waiting[0]
            kin = turn.group.home if turn.group else None
            engine = self._router.choose(turn.cost(), (turn.trajectory.home, kin))
            if engine is None:
                return
            self._waiting.popleft()
            self._give(engine, turn)

    def _give(self, engine: EngineId, turn: Turn) -> None:
        turn.request_id = next(self._request_ids)
        turn.unspent = turn.cost()
        self._router.charge(engine, turn.unspent)
        self._inflight[engine][turn.request_id] = turn
        turn.trajectory.home = engine
        turn.trajectory.state = TrajectoryState.RUNNING
        self._journal.started(turn.trajectory)
        if turn.group:
            turn.group.home = engine
        self._carriers[engine].send(turn.request())

    def _take_over(self, engine: EngineId) -> None:
        """An engine that comes late gets its share of what others have not begun, newest first."""
        serving = self._router.serving
        loads = {other: self._router.outstanding_tokens(other) for other in serving}
        total = sum(loads.values())
        room, moved = self._router.room(engine), list[Turn]()
        for other in serving:
            excess = loads[other] - total * self._router.fair_share(other)
            turns = [
                turn for turn in reversed(self._inflight[other].values()) if not turn.has_begun
            ]
            withdrawn: list[int] = []
            for turn in turns:
                excess -= turn.unspent
                if other == engine or excess < 0 or len(moved) == room:
                    break
                withdrawn.append(turn.request_id)
                self._take_back(other, turn)
                moved.append(turn)
            if withdrawn:
                self._carriers[other].withdraw(withdrawn)
        for turn in reversed(moved):
            self._give(engine, turn)
        self.counters["moved"] += len(moved)

    def on_batch(self, engine: EngineId, batch: DeltaBatch) -> None:
        """Applies what an engine streamed."""
        inflight = self._inflight.get(engine)
        if inflight is None:
            return
        runs: list[_Run] = []
        self._router.measure(engine, len(batch.tokens), self._clock())
        for idx, request_id in enumerate(batch.ids):
            turn = inflight.get(request_id)
            if turn is None:
                self.counters["late_runs"] += 1
                continue
            run = self._on_run(engine, turn, batch, idx)
            if run is not None and run.uid >= 0:
                runs.append(run)
        self._record(runs, batch)
        for request_id, reason in batch.finishes:
            turn = inflight.get(request_id)
            if turn is not None:
                self._on_finish(engine, turn, reason)
        self.pump()

    def _on_run(self, engine: EngineId, turn: Turn, batch: DeltaBatch, idx: int) -> _Run | None:
        """Appends run `idx` as far as it is new and there is room; what was appended."""
        trajectory, begin, end = turn.trajectory, batch.bounds[idx], batch.bounds[idx + 1]
        missing = trajectory.missing_before(batch.positions[idx])
        if missing > 0:
            self.counters["gaps"] += 1
            self._carriers[engine].withdraw([turn.request_id])
            self._retry(engine, turn, f"{missing} tokens were lost on the way")
            return None
        if missing < 0:
            self.counters["repeats"] += 1
            begin = min(end, begin - missing)
        end = min(end, begin + turn.room())
        if begin == end:
            return None
        start, version = trajectory.completion_len, batch.versions[idx]
        trajectory.append_generated(batch.tokens[begin:end], batch.logprobs[begin:end], version)
        self._router.progress(engine, end - begin)
        turn.unspent -= end - begin
        turn.num_errors = 0  # it is getting on
        return _Run(trajectory.uid, start, begin, end, version)

    def _record(self, runs: Sequence[_Run], batch: DeltaBatch) -> None:
        if not runs:
            return
        columns = np.asarray(runs, np.int64).T
        uids, starts, begins, ends, versions = columns
        offsets = np.concatenate([[0], np.cumsum(ends - begins)])
        if offsets[-1] == len(batch.tokens):
            tokens, logprobs = batch.tokens, batch.logprobs
        else:
            tokens = np.concatenate([batch.tokens[run.begin : run.end] for run in runs])
            logprobs = np.concatenate([batch.logprobs[run.begin : run.end] for run in runs])
        self._journal.on_tokens(uids, starts, offsets, versions, tokens, logprobs)

    def _on_finish(self, engine: EngineId, turn: Turn, reason: str) -> None:
        outcome = turn.outcome()
        if outcome:
            self._take_back(engine, turn)
            turn.on_end(turn, outcome)
        elif reason == "abort":
            self.counters["aborts"] += 1
            self._take_back(engine, turn)
            self._requeue(turn)
        else:
            self._retry(engine, turn, reason)

    def _retry(self, engine: EngineId, turn: Turn, reason: str) -> None:
        """Resumes a turn that an engine got wrong, a limited number of times."""
        self._take_back(engine, turn)
        turn.num_errors += 1
        self.counters["retries"] += 1
        logger.warning(
            "%s failed %s after %d tokens: %r; it goes on from there",
            engine, turn.trajectory.sample_id, turn.trajectory.completion_len, reason,
        )  # fmt: skip
        if turn.num_errors < _MAX_TURN_ERRORS:
            self._requeue(turn)
            return
        self._on_failure(
            EngineError(
                f"{engine} failed {turn.trajectory.sample_id} after "
                f"{turn.trajectory.completion_len} tokens, attempt {turn.num_errors} of "
                f"{_MAX_TURN_ERRORS}: {reason!r} with {turn.room()} tokens left and no stop token "
                "last; see the engine's log"
            )
        )

    def _take_back(self, engine: EngineId, turn: Turn) -> None:
        del self._inflight[engine][turn.request_id]
        self._router.release(engine, turn.unspent)
        turn.unspent = 0

    def _requeue(self, turn: Turn) -> None:
        outcome = turn.outcome()
        if outcome:
            turn.on_end(turn, outcome)
            return
        turn.trajectory.cut()
        self._journal.cut(turn.trajectory)
        self._waiting.appendleft(turn)

    def check_integrity(self) -> None:
        """Asserts that every turn is in one place and that the router counts agree."""
        self._router.check_integrity()
        turns = [*self._waiting, *(t for held in self._inflight.values() for t in held.values())]
        assert len(turns) == len({id(turn) for turn in turns})
        for engine, held in self._inflight.items():
            unspent = sum(turn.unspent for turn in held.values())
            assert self._router.outstanding_tokens(engine) == unspent, (engine, unspent)
