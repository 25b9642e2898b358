"""Changes to torchrun's own process: a stop may take its time and ends in words, and ranks of one
machine meet at its loopback address.

torchrun kills ranks 30 s after it has passed a signal on, also in the middle of a checkpoint, and
ends with a stack whose cause is that signal. With --standalone it looks this machine's own name
up, and waits for minutes where the name has no address. It loads the entry points of the group
`torchrun.handlers` before it reads its settings. This one has no effect unless torchrun starts
`umbra.trainer` or `umbra.trainer.sft`, or at --standalone also a replay or the doctor; torchrun's
own options and variables take precedence.
"""

from __future__ import annotations

import os
import sys
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
    if started and "--standalone" in sys.argv:
        os.environ.setdefault("PET_LOCAL_ADDR", "localhost")
    if {"umbra.trainer", "umbra.trainer.sft"} & set(started):
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_TIMEOUT_S))
        sys.excepthook = _end_in_words
    return _refuse


def _refuse(parameters: object) -> NoReturn:
    raise ValueError("umbra has no rendezvous of its own: use --rdzv-backend c10d")


def _end_in_words(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if kind.__name__ == "SignalException" or _is_stop(error):
        print("torchrun: ended by a stop; the lines above tell what was saved", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _is_stop(error: BaseException) -> bool:
    """Whether it is torch's ChildFailedError of ranks that a stop signal ended."""
    failures: dict[int, Any] = getattr(error, "failures", {})
    codes = {failure.exitcode for failure in failures.values()}
    return bool(codes) and codes <= _STOPPED
