from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

_LEAST_GRACE_S: Final = 5.0
# A write of a checkpoint that has not been measured. Longer keeps a rank that hangs in its first
# write; shorter cuts off the first checkpoint of a large model.
_UNMEASURED_CHECKPOINT_S: Final = 30.0


class StopForecast:
    """Foretells when a stop ends, and what an end before that would lose. Its methods are called on
    several threads and in signal handlers, and return at once.

    A signal ends a wait for rollouts at once. Training on a batch and writing a checkpoint end by
    themselves, and take about as long as they took before. All `step` steps done so far are in the
    checkpoint that the run resumed from. `given_grace_s` is `train.shutdown_grace_s`; `show` shows
    a line to the operator.
    """

    def __init__(
        self,
        step: int,
        given_grace_s: float | None,
        show: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._step = step
        self._saved_step = step
        self._given_grace_s = given_grace_s
        self._show = show
        self._clock = clock
        self._began_at: float | None = None  # the training on a batch, if it is in progress
        self._step_s: float | None = None  # the longest so far
        self._save_s: float | None = None  # the longest so far

    @contextmanager
    def training(self) -> Generator[None]:
        """A block that a signal does not end: training on the batch of one step."""
        began_at = self._began_at = self._clock()
        try:
            yield
        finally:
            self._began_at = None
        self._step_s = max(self._step_s or 0.0, self._clock() - began_at)
        self._step += 1

    def saving(self) -> Callable[[], None]:
        """A checkpoint of the steps so far begins; call the result when it is complete."""
        step, began_at = self._step, self._clock()

        def complete() -> None:
            self._save_s = max(self._save_s or 0.0, self._clock() - began_at)
            self._saved_step = step

        return complete

    def grace_s(self, number: signal.Signals) -> float:
        """The time that the work in progress has after a signal. SIGINT has no limit: a person at a
        terminal sees what it waits for, and can press Ctrl-C again."""
        if number == signal.SIGINT:
            return math.inf
        if self._given_grace_s is not None:
            return self._given_grace_s
        if self._step_s is None:
            return _LEAST_GRACE_S
        save_s = _UNMEASURED_CHECKPOINT_S if self._save_s is None else self._save_s
        return max(_LEAST_GRACE_S, 2 * (self._step_s + save_s))

    def announce(self, cause: str) -> None:
        """Shows what a stop waits for. Called on a thread of its own."""
        again = " Ctrl-C again ends the run at once" if cause == signal.SIGINT.name else ""
        if again and (loss := self.loss()):
            again += f": {loss}"
        self._show(f"{cause}: {self._plan()}.{again}")

    def _plan(self) -> str:
        if self._began_at is not None:
            num = self._step + 1
            if self._step_s is None:
                when = f"step {num} has to end, and no step has been timed yet"
            else:
                left_s = max(self._began_at + self._step_s - self._clock(), 1.0)
                when = f"step {num} ends in about {left_s:.0f} s"
            return f"{when}; then a checkpoint is written"
        if self._step > self._saved_step:
            return f"writing the checkpoint of step {self._step}"
        return "ending what is in progress; there is no new step to save"

    def loss(self) -> str:
        """The steps that an end now would lose, as the end of a sentence; "" for none."""
        first, last = self._saved_step + 1, self._step + (self._began_at is not None)
        if first > last:
            return ""
        steps = f"step {first} is" if first == last else f"steps {first} to {last} are"
        kept = f"the newest checkpoint is of step {self._saved_step}"
        return f"{steps} lost; {kept if self._saved_step else 'there is no checkpoint'}"
