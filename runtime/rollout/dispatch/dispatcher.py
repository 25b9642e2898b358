"""Tracks where each turn is, and handles deltas, finishes and the deaths of engines.

    submit -> waiting -> in flight on one engine -> on_end("stop" | "length")
                 ^              |
                 +--------------+  abort, error, lost tokens, death of the engine: the turn
                                   resumes from prompt + tokens so far, on any serving engine

It runs on one loop and never waits: links and fleet feed it events. All runs of a batch are applied
at once, in columns (`TokenStore.apply`). Only finishes, and runs that do not simply extend their
trajectory, are handled one by one.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.engine_api.token_deltas import DeltaBatch
from umbra.runtime.errors import EngineError, UmbraError
from umbra.runtime.rollout.dispatch.pool_load import EngineIdleness
from umbra.runtime.rollout.dispatch.router import EngineId, Router
from umbra.runtime.rollout.dispatch.token_store import Runs, TokenStore
from umbra.runtime.rollout.dispatch.trajectory import Trajectory, Turn
from umbra.runtime.text.stop_texts import StopTexts

logger = logging.getLogger(__name__)

# A turn that engines fail this often without a token in between is considered the cause. Engines
# that die do not count. With 3, three faults of engines that met one turn by chance ended a run.
_MAX_TURN_ERRORS: Final = 5
# Turns that an engine failed and that others pass while all other engines are full. More let a
# broken engine fail all that wait, and are looked at with every batch; fewer leave an engine idle
# that failed a few.
_MAX_PASSED: Final = 16
# Requests listed as not begun although they may have begun or ended. Fewer are sorted out more
# often; more take memory.
_MAX_STALE: Final = 64
_COUNTERS: Final = (
    "gaps", "repeats", "retries", "aborts", "engines_lost", "late_runs", "lost_tokens", "moved",
)  # fmt: skip
# Counters that become metrics of each batch.
_REPORTED_COUNTERS: Final = ("engines_lost", "lost_tokens")


class RequestCarrier(Protocol):
    """The dispatcher's view of an engine link; both methods return at once."""

    def send(self, request: dict[str, Any]) -> None: ...

    def withdraw(self, request_ids: list[int]) -> None: ...


class TokenRecorder(Protocol):
    def started(self, sample: Trajectory) -> None: ...

    def cut(self, sample: Trajectory) -> None: ...

    def on_tokens(self, runs: Runs) -> None: ...


class Moved(NamedTuple):
    num_trajectories: int
    num_tokens: int


class Dispatcher:
    """Assigns turns to engines and applies the tokens that they return.

    Args:
        on_failure: called with the error of a turn that failed for good and has no `on_error`.
        recorder: receives the tokens of recorded trajectories (`uid` not -1).
        on_work: called whenever `has_work` may have changed.

    Attributes:
        stop_texts: end all turns; set before the first one.
        num_generated: tokens that engines generated for trajectories, also for held-out ones.
        counters: failures so far. "lost_tokens" counts tokens that engines generated and no sample
            has: late or missing tokens, tokens behind a gap, and tokens that agent loops discarded.
            It leaves out the last tick of an engine that was killed.
    """

    def __init__(
        self,
        router: Router,
        on_failure: Callable[[UmbraError], None],
        recorder: TokenRecorder,
        clock: Callable[[], float] = time.monotonic,
        on_work: Callable[[bool], None] = lambda has_work: None,
    ) -> None:
        self._on_work = on_work
        self._router = router
        self._recorder = recorder
        self._on_failure = on_failure
        self._store = TokenStore()
        self._clock = clock
        self.idleness = EngineIdleness(clock)
        # Bounded by what the manager admits; a dictionary, so that any of them can be removed.
        self._waiting: OrderedDict[Turn, None] = OrderedDict()
        self._carriers: dict[EngineId, RequestCarrier] = {}
        self._inflight: dict[EngineId, dict[int, Turn]] = {}
        # Requests that had not begun when last looked at, oldest first. One that has begun or ended
        # is looked at once more.
        self._not_begun: dict[EngineId, list[int]] = {}
        self._numbers: dict[EngineId, int] = {}  # engines' numbers in the store
        self._engine_numbers = itertools.count()
        self._request_ids = itertools.count(1)
        self.stop_texts: StopTexts | None = None
        self.num_generated = 0
        self.counters = dict.fromkeys(_COUNTERS, 0)
        # The counters at the last `take_metrics`.
        self._reported: dict[str, int] = dict.fromkeys(_REPORTED_COUNTERS, 0)

    def take_metrics(self) -> dict[str, float]:
        """The engines' idle shares and losses since the last call."""
        now = {name: self.counters[name] for name in _REPORTED_COUNTERS}
        before, self._reported = self._reported, now
        losses = {name: float(count - before[name]) for name, count in now.items()}
        return {**self.idleness.take_shares(), **losses}

    def submit(self, turn: Turn) -> None:
        """Queues a turn, or ends it at once if it may not generate another token."""
        if self.stop_texts is not None:  # an earlier manager may have had the turn
            made = turn.trajectory.tokens[turn.start :]
            turn.is_stopped = self.stop_texts.num_until_stop(made[:0], made) > 0
        outcome = turn.outcome()
        if outcome:
            turn.on_end(turn, outcome)
            return
        self._waiting[turn] = None
        if turn.forced is not None:  # it is short, and a whole group waits for it
            self._waiting.move_to_end(turn, last=False)
        self.pump()

    def cancel(self, turns: Iterable[Turn]) -> None:
        """Forgets turns wherever they are and withdraws their requests from engines."""
        dropped = set(turns)
        by_engine: dict[EngineId, list[int]] = {}
        for turn in dropped:
            turn.is_cancelled = True
            self._waiting.pop(turn, None)
            if turn.engine is not None:
                by_engine.setdefault(turn.engine, []).append(turn.request_id)
                self._end_attempt(turn.engine, turn)
        for engine, request_ids in by_engine.items():
            self._carriers[engine].withdraw(sorted(request_ids))
        self.pump()

    def attach(self, engine: EngineId, carrier: RequestCarrier) -> None:
        """Adds an engine that can be reached; it gets turns once `set_serving` was called."""
        self._carriers[engine] = carrier
        self._inflight[engine], self._not_begun[engine] = {}, []
        self._numbers[engine] = next(self._engine_numbers)
        self._router.set_serving(engine, False)

    def set_serving(self, engine: EngineId, serving: bool) -> None:
        if engine in self._carriers:
            self._router.set_serving(engine, serving)
            self.pump()
            if serving:
                self._rebalance_to(engine)

    def detach(self, engine: EngineId) -> Moved:
        """Removes a lost engine; its turns resume on other engines, oldest first."""
        turns = list(self._inflight[engine].values())
        for turn in turns:
            self._end_attempt(engine, turn)
        for held in (self._inflight, self._not_begun, self._carriers, self._numbers):
            del held[engine]
        self._router.remove(engine)
        self._requeue(turns)
        self.pump()
        self.counters["engines_lost"] += 1
        return Moved(len(turns), sum(turn.trajectory.num_generated for turn in turns))

    def hand_back(self, engine: EngineId, request_ids: Iterable[int]) -> None:
        """Requeues requests that the engine rejected; it gets no others until its state changes."""
        self._router.set_serving(engine, False)
        inflight = self._inflight.get(engine, {})
        turns = [inflight[request_id] for request_id in request_ids if request_id in inflight]
        for turn in turns:
            self._end_attempt(engine, turn)
        self._requeue(turns)
        self.pump()

    def fail_attempt(self, engine: EngineId, request_id: int, reason: str) -> None:
        """Requeues a request that the engine failed, as often as a turn may fail."""
        turn = self._inflight.get(engine, {}).get(request_id)
        if turn is not None:
            if self._may_retry(engine, turn, reason):
                self._requeue([turn])
            self.pump()

    def refuse(self, engine: EngineId, request_id: int, error: UmbraError) -> None:
        """Fails a turn that no engine could ever serve."""
        turn = self._inflight.get(engine, {}).get(request_id)
        if turn is not None:
            self._end_attempt(engine, turn)
            self._fail(turn, error)
            self.pump()

    def num_inflight(self, engine: EngineId) -> int:
        return len(self._inflight.get(engine, ()))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or any(self._inflight.values())

    def pump(self) -> None:
        self._assign_waiting()
        self._on_work(self.has_work)

    def _assign_waiting(self) -> None:
        passed: list[Turn] = []  # the engines are full that have not failed them
        while self._waiting:
            turn = next(iter(self._waiting))
            group_engine = turn.group.last_engine if turn.group else None
            engine = self._router.choose(
                turn.cost(), turn.trajectory.last_engine, group_engine, turn.failed_by
            )
            if engine is None and (turn.failed_by is None or len(passed) == _MAX_PASSED):
                break
            del self._waiting[turn]
            if engine is None:
                passed.append(turn)
            else:
                self._assign(engine, turn)
        for turn in reversed(passed):
            if not turn.is_cancelled:  # by a recorder that failed
                self._waiting[turn] = None
                self._waiting.move_to_end(turn, last=False)

    def _assign(self, engine: EngineId, turn: Turn) -> None:
        if turn.is_cancelled:
            return
        trajectory = turn.trajectory
        turn.request_id = next(self._request_ids)
        turn.engine = engine
        turn.charged = turn.cost()
        self._router.charge(engine, turn.charged)
        held = self._inflight[engine]
        held[turn.request_id] = turn
        not_begun = self._not_begun[engine]
        not_begun.append(turn.request_id)
        if len(not_begun) > 2 * len(held) + _MAX_STALE:
            not_begun[:] = [id for id in not_begun if id in held and not held[id].has_begun]
        if len(held) == 1:
            self.idleness.hold(engine, True)
        turn.row = self._store.open(
            turn.request_id,
            self._numbers[engine],
            trajectory.uid,
            length=trajectory.completion_len,
            capacity=turn.num_tokens_left(),
        )
        trajectory.begin_attempt(self._store, turn.row)
        trajectory.last_engine = engine
        if turn.group:
            turn.group.last_engine = engine
        self._carriers[engine].send(turn.request())
        self._recorder.started(trajectory)  # a recorder that fails cancels all turns

    def _rebalance_to(self, engine: EngineId) -> None:
        """Moves turns that have not begun, nor failed there, to an engine that joins late, newest
        first."""
        capacity, moved = self._router.capacity_left(engine), list[Turn]()
        overloaded = self._router.overloaded() if capacity else []
        for other, excess in overloaded:
            if other == engine:
                continue
            held, not_begun = self._inflight[other], self._not_begun[other]
            withdrawn, failed = list[int](), list[int]()
            while not_begun and len(moved) < capacity:
                turn = held.get(not_begun[-1])
                if turn is not None and not turn.has_begun:
                    if turn.failed_by == engine:
                        failed.append(not_begun.pop())
                        continue
                    excess -= turn.unspent
                    if excess < 0:
                        break
                    withdrawn.append(turn.request_id)
                    self._end_attempt(other, turn)
                    moved.append(turn)
                not_begun.pop()
            not_begun.extend(reversed(failed))
            if withdrawn:
                self._carriers[other].withdraw(withdrawn)
        for turn in reversed(moved):
            self._assign(engine, turn)
        self.counters["moved"] += len(moved)

    def on_batch(self, engine: EngineId, batch: DeltaBatch) -> None:
        inflight = self._inflight.get(engine)
        if inflight is None:
            return
        self._router.measure(engine, len(batch.tokens), self._clock())
        singly = self._may_stop(batch)
        applied = self._store.apply(self._numbers[engine], batch, singly)
        self.counters["late_runs"] += applied.num_late
        self.counters["lost_tokens"] += applied.num_late_tokens
        if applied.runs is not None:
            self._on_appended(engine, applied.runs)
        lost = self._apply_one_by_one(engine, batch, applied.irregular) if applied.irregular else {}
        for request_id, missing in lost.items():
            turn = inflight.get(request_id)
            if turn is not None:
                self.counters["gaps"] += 1
                self._carriers[engine].withdraw([request_id])
                if self._may_retry(engine, turn, f"{missing} tokens were lost on the way"):
                    self._requeue([turn])
        for request_id in {int(batch.ids[run]) for run in applied.irregular}:
            turn = inflight.get(request_id)
            if turn is not None and turn.is_stopped:
                self._carriers[engine].withdraw([request_id])
                self._end_attempt(engine, turn)
                turn.on_end(turn, "stop")
        cut: list[Turn] = []
        for request_id, reason in batch.finishes:
            turn = inflight.get(request_id)
            if turn is not None and self._is_cut(engine, turn, reason):
                cut.append(turn)
        self._requeue(cut)
        self.pump()

    def _on_appended(self, engine: EngineId, runs: Runs) -> None:
        self.num_generated += len(runs.tokens)
        self._router.progress(engine, len(runs.tokens))
        recorded = runs.recorded()
        if len(recorded.uids):
            self._recorder.on_tokens(recorded)

    def _apply_one_by_one(
        self, engine: EngineId, batch: DeltaBatch, runs: list[int]
    ) -> dict[int, int]:
        """Appends the new tokens of these runs; returns how many each broken request lacks."""
        lost: dict[int, int] = {}
        for run in runs:
            request_id = int(batch.ids[run])
            start, stop = int(batch.bounds[run]), int(batch.bounds[run + 1])
            turn = self._inflight[engine].get(request_id)  # a recorder that fails cancels all turns
            if turn is None or turn.is_stopped or request_id in lost:
                self.counters["late_runs"] += 1
                self.counters["lost_tokens"] += stop - start
                continue
            missing = turn.trajectory.missing_before(int(batch.positions[run]))
            if missing > 0:
                lost[request_id] = missing
                self.counters["lost_tokens"] += missing + stop - start
                continue
            if missing < 0:
                self.counters["repeats"] += 1
                start = min(stop, start - missing)
            new = slice(start, min(stop, start + turn.num_tokens_left()))
            if num_tokens := self._num_until_stop(turn, batch.tokens[new]):
                turn.is_stopped = True
                new = slice(start, start + num_tokens)
                self.counters["lost_tokens"] += stop - new.stop
            self._append(engine, turn, batch.tokens[new], batch.logprobs[new], batch.versions[run])
        return lost

    def _may_stop(self, batch: DeltaBatch) -> NDArray[np.bool_] | None:
        """[S] which runs have a token that could complete a stop text; None without stop texts."""
        if self.stop_texts is None:
            return None
        counts = np.zeros(len(batch.tokens) + 1, np.int64)
        np.cumsum(self.stop_texts.may_complete(batch.tokens), out=counts[1:])
        return counts[batch.bounds[1:]] > counts[batch.bounds[:-1]]

    def _num_until_stop(self, turn: Turn, tokens: NDArray[np.int32]) -> int:
        """The number of new tokens up to the end of a stop text; 0 if none ends among them."""
        if self.stop_texts is None or turn.forced is not None:
            return 0
        return self.stop_texts.num_until_stop(turn.trajectory.tokens[turn.start :], tokens)

    def _append(
        self,
        engine: EngineId,
        turn: Turn,
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        version: np.int64,
    ) -> None:
        if not len(tokens):
            return
        trajectory = turn.trajectory
        runs = Runs(
            np.asarray([trajectory.uid], np.int64),
            np.asarray([trajectory.completion_len], np.int64),
            np.asarray([0, len(tokens)], np.int64),
            np.asarray([version], np.int64),
            tokens,
            logprobs,
        )
        trajectory.append_generated(tokens, logprobs, int(version))
        self._on_appended(engine, runs)

    def _is_cut(self, engine: EngineId, turn: Turn, reason: str) -> bool:
        """Ends the attempt, and returns whether another one must follow."""
        outcome = turn.outcome()
        if not outcome and reason != "abort":
            return self._may_retry(engine, turn, reason)
        self._end_attempt(engine, turn)
        if outcome:
            turn.on_end(turn, outcome)
            return False
        self.counters["aborts"] += 1
        return True

    def _may_retry(self, engine: EngineId, turn: Turn, reason: str) -> bool:
        """Ends the attempt after an engine's error. A turn may resume a limited number of times."""
        self._end_attempt(engine, turn)
        turn.num_errors += 1
        turn.failed_by = engine
        self.counters["retries"] += 1
        logger.warning(
            "%s failed %s after %d tokens: %r; the turn resumes from there",
            engine, turn.trajectory.sample_id, turn.trajectory.completion_len, reason,
        )  # fmt: skip
        if turn.num_errors < _MAX_TURN_ERRORS:
            return True
        self._fail(
            turn,
            EngineError(
                f"{engine} failed {turn.trajectory.sample_id} after "
                f"{turn.trajectory.completion_len} tokens, attempt {turn.num_errors} of "
                f"{_MAX_TURN_ERRORS}: {reason!r} with {turn.num_tokens_left()} tokens left and no "
                "stop token last; see the engine's log"
            ),
        )
        return False

    def _fail(self, turn: Turn, error: UmbraError) -> None:
        (turn.on_error or self._on_failure)(error)

    def _end_attempt(self, engine: EngineId, turn: Turn) -> None:
        held = self._inflight[engine]
        del held[turn.request_id]
        if not held:
            self.idleness.hold(engine, False)
        num_tokens = turn.trajectory.settle()
        self._store.close(turn.request_id, turn.row)
        self._router.release(engine, turn.charged - num_tokens)
        turn.engine = None
        if turn.forced is not None:
            self.num_generated -= num_tokens
        turn.has_grown = num_tokens > 0
        if turn.has_grown:
            turn.num_errors = 0

    def _requeue(self, turns: Sequence[Turn]) -> None:
        """Puts turns before all that wait, in their order."""
        for turn in reversed(turns):
            if turn.is_cancelled:  # maybe by the end of another one
                continue
            outcome = turn.outcome()
            if outcome:
                turn.on_end(turn, outcome)
                continue
            self._waiting[turn] = None
            self._waiting.move_to_end(turn, last=False)
            if turn.has_grown:
                turn.trajectory.cut()
                self._recorder.cut(turn.trajectory)

    def check_integrity(self) -> None:
        """Asserts that every turn is in exactly one place and that all counts agree."""
        self._router.check_integrity()
        self._store.check_integrity()
        turns = [*self._waiting, *(t for held in self._inflight.values() for t in held.values())]
        assert len(turns) == len({id(turn) for turn in turns})
        self.idleness.check_integrity({e for e, held in self._inflight.items() if held})
        for engine, held in self._inflight.items():
            unspent = sum(turn.unspent for turn in held.values())
            assert self._router.outstanding_tokens(engine) == unspent, (engine, unspent)
            not_begun = {request_id for request_id, turn in held.items() if not turn.has_begun}
            assert not_begun <= set(self._not_begun[engine]), engine
