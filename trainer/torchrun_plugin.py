"""Changes to torchrun's own process: a stop may take its time, stops and errors end in words, nohup
is respected, and ranks of one machine meet at its loopback address.

torchrun kills ranks 30 s after it has passed a signal on, also in the middle of a checkpoint, and
ends with a stack, whose cause is that signal, or a report of 20 lines for each rank that has
reported its error. It passes SIGHUP on even where nohup has it ignored. With --standalone it looks
this machine's own name up, and waits for minutes where the name has no address. It loads the entry
points of the group `torchrun.handlers` before it reads its settings. This one has no effect unless
torchrun starts `umbra.trainer` or a program in it; only training gets the time. torchrun's own
options and variables take precedence.
"""

from __future__ import annotations

import os
import signal
import sys
from operator import attrgetter
from types import TracebackType
from typing import Any, Final, NoReturn

from umbra.runtime.cluster.run_requests import PREEMPT_SIGNAL, stop_status
from umbra.runtime.process.process_end import STOP_SIGNALS

_TIMEOUT_S: Final = 7 * 24 * 3600
"""Ranks end by themselves in time: see `umbra.trainer.world.signals`. A shorter time cuts a long
step."""
_STOPPED: Final = frozenset(stop_status(number) for number in (*STOP_SIGNALS, PREEMPT_SIGNAL))


def prepare_torchrun() -> object:
    """The entry point. Returns what torchrun expects, a maker of rendezvous handlers."""
    started = [given for given in sys.argv if given.startswith("umbra.trainer")]
    if started and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    if started and "--standalone" in sys.argv:
        os.environ.setdefault("PET_LOCAL_ADDR", "localhost")
    if {"umbra.trainer", "umbra.trainer.sft"} & set(started):
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_TIMEOUT_S))
    if started:
        sys.excepthook = _end_in_words
    return _refuse


def _refuse(parameters: object) -> NoReturn:
    raise ValueError("umbra has no rendezvous of its own: use --rdzv-backend c10d")


def _end_in_words(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    failed: list[Any] = list(getattr(error, "failures", {}).values())  # of torch's ChildFailedError
    # By `FatalErrorReporter`: a rank that was killed leaves nothing, and the others name it.
    reported = [failure for failure in failed if not isinstance(failure.message, str)]
    if kind.__name__ == "SignalException" or (failed and {f.exitcode for f in failed} <= _STOPPED):
        print("torchrun: ended by a stop; the lines above say what was saved", file=sys.stderr)
    elif reported:
        first = min(reported, key=attrgetter("timestamp"))
        print(f"torchrun: {first.message['message']}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
