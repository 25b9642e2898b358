from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from umbra.engines.faulty.fault import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class DueFault:
    """A fault that happens now, due at token `point` of this incarnation; `draw` in [0, 1) chooses
    a part of a batch."""

    fault: Fault
    point: int
    draw: float


class FaultSchedule:
    """The faults due in one incarnation: pure, and the same arguments give the same points.

        generated tokens  0 ────────●──────────●───●────────▶
                               points, known from the seed before the first token

    A batch of deltas that reaches a point suffers the fault, a call once its point is passed.
    Several points of one fault within a batch count as one. Without `every_tokens`, the fault hits
    its next `times` batches (or calls) in a row.
    """

    def __init__(
        self, faults: Sequence[Fault], *, seed: int, engine: str, incarnation: int
    ) -> None:
        self.num_tokens = 0
        self._of_batches: list[_Timer] = []
        self._of_calls: dict[str, list[_Timer]] = {}
        for idx, fault in enumerate(faults):
            if not fault.concerns(engine, incarnation):
                continue
            timer = _Timer(fault, f"{seed}/{engine}/{incarnation}/{idx}")
            if fault.kind == "error" and fault.call != "deltas":
                self._of_calls.setdefault(fault.call, []).append(timer)
            else:
                self._of_batches.append(timer)

    def on_batch(self, num_tokens: int) -> list[DueFault]:
        self.num_tokens += num_tokens
        dues = [timer.take(self.num_tokens) for timer in self._of_batches]
        return [due for due in dues if due is not None]

    def on_call(self, call: str) -> DueFault | None:
        for timer in self._of_calls.get(call, ()):
            due = timer.take(self.num_tokens)
            if due is not None:
                return due
        return None


class _Timer:
    """The points of one fault in one incarnation; `key` seeds everything random."""

    def __init__(self, fault: Fault, key: str) -> None:
        self._fault = fault
        self._points = fault_points(fault, random.Random(f"{key}/points"))
        self._draws = random.Random(f"{key}/draws")
        self._next_point = next(self._points)
        self._num_left = fault.times

    def take(self, num_tokens: int) -> DueFault | None:
        if self._num_left == 0 or self._next_point > num_tokens:
            return None
        if self._num_left is not None:
            self._num_left -= 1
        due = DueFault(fault=self._fault, point=self._next_point, draw=self._draws.random())
        if self._fault.every_tokens is not None:
            while self._next_point <= num_tokens:
                self._next_point = next(self._points)
        return due


def fault_points(fault: Fault, rng: random.Random) -> Iterator[int]:
    """Endless: `after_tokens` again and again, or points at geometric distances after it."""
    point = fault.after_tokens
    while True:
        if fault.every_tokens is not None:
            point += _distance(fault.every_tokens, rng)
        yield point


def _distance(mean: float, rng: random.Random) -> int:
    """Geometric: 1 + the tokens before the first that is hit, with odds of 1 / mean each."""
    draw = rng.random()
    return 1 if mean == 1 else 1 + int(math.log1p(-draw) / math.log1p(-1 / mean))
