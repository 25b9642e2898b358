from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final, Literal

Phase = Literal["step", "checkpoint"]

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
        self._phase: tuple[Phase, float] | None = None
        self._longest_s: dict[Phase, float] = {}

    @contextmanager
    def phase(self, phase: Phase) -> Generator[None]:
        """A block that a signal does not end: training on the batch of one step,
        or a checkpoint."""
        began_at = self._clock()
        self._phase = phase, began_at
        try:
            yield
        finally:
            self._phase = None
        longest_s = max(self._longest_s.get(phase, 0.0), self._clock() - began_at)
        self._longest_s[phase] = longest_s
        if phase == "step":
            self._step += 1
        else:
            self._saved_step = self._step

    def grace_s(self, number: signal.Signals) -> float:
        """The time that the work in progress has after a signal. SIGINT has no limit: a person at a
        terminal sees what it waits for, and can press Ctrl-C again."""
        if number == signal.SIGINT:
            return math.inf
        if self._given_grace_s is not None:
            return self._given_grace_s
        if "step" not in self._longest_s:
            return _LEAST_GRACE_S
        save_s = self._longest_s.get("checkpoint", _UNMEASURED_CHECKPOINT_S)
        return max(_LEAST_GRACE_S, 2 * (self._longest_s["step"] + save_s))

    def announce(self, cause: str) -> None:
        """Shows what a stop waits for. Called on a thread of its own."""
        again = " Ctrl-C again ends the run at once" if cause == signal.SIGINT.name else ""
        if again and (loss := self.loss()):
            again += f": {loss}"
        self._show(f"{cause}: {self._plan()}.{again}")

    def _plan(self) -> str:
        phase, began_at = self._phase or ("", 0.0)
        if phase == "step":
            num = self._step + 1
            longest_s = self._longest_s.get("step")
            if longest_s is None:
                when = f"step {num} has to end, and no step has been timed yet"
            else:
                left_s = max(began_at + longest_s - self._clock(), 1.0)
                when = f"step {num} ends in about {left_s:.0f} s"
            return f"{when}; then a checkpoint is written"
        if phase == "checkpoint" or self._step > self._saved_step:
            return f"writing the checkpoint of step {self._step}"
        return "ending what is in progress; there is no new step to save"

    def loss(self) -> str:
        """The steps that an end now would lose, as the end of a sentence; "" for none."""
        is_training = self._phase is not None and self._phase[0] == "step"
        first, last = self._saved_step + 1, self._step + is_training
        if first > last:
            return ""
        steps = f"step {first} is" if first == last else f"steps {first} to {last} are"
        kept = f"the newest checkpoint is of step {self._saved_step}"
        return f"{steps} lost; {kept if self._saved_step else 'there is no checkpoint'}"
