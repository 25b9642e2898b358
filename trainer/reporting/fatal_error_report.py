"""Reports the error that ends a rank, once, and makes sure that the rank ends.

    error in this rank   ──▶ report(), then the other ranks are informed, then the session closes
    error in another one ──▶ job_failed() ──▶ the session's next call raises it: report()
                                          └─▶ limit_s later: report(), and the process ends

When the job is lost, a rank may be far from any call of the session: it may load a model, or wait
in torch for a rank that never comes. torchrun sends SIGTERM to ranks that end later than another,
so a rank reports before anything that takes time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Final, Self

from umbra.runtime.errors import (
    ActorError,
    DeadlineExceeded,
    JobFailed,
    RemoteError,
    TransportError,
    UmbraError,
)
from umbra.runtime.session.session import Session
from umbra.runtime.terminal_text import escape_unprintable
from umbra.trainer.world.signals import StopNow

# How long a rank that lost another one waits for the supervisor to report which rank or process
# failed first. The supervisor knows within milliseconds; a rank's own errors are delayed this long.
_CAUSE_TIMEOUT_S: Final = 1.0
# For the supervisors to write what all processes are doing, before this rank ends.
_BUNDLE_LIMIT_S: Final = 20.0


class FatalErrorReporter:
    """Entered by the main thread; any thread may call it. `rank` is -1 while unknown; `limit_s` is
    the time from the job's failure to the end of this process."""

    def __init__(self, rank: int, limit_s: float) -> None:
        self._name = f"rank {rank}" if rank >= 0 else "umbra"
        self._rank = rank
        self._limit_s = limit_s
        self._is_reported = False
        self._lock = threading.Lock()
        self._failure: JobFailed | None = None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        failure = self._failure
        if isinstance(error, StopNow) and (failure is None or StopNow.is_cause_of(failure)):
            self.stopped(error)
        elif error is not None and failure is not None:
            is_its_own = str(failure).startswith(f"rank {self._rank} failed")
            if not (is_its_own and isinstance(error, SystemExit)):
                self.report(failure)

    def report(self, error: UmbraError) -> None:
        """Prints the error to stderr and writes it for torchrun, unless one was reported before."""
        with self._lock:
            if self._is_reported:
                return
            self._is_reported = True
            message = f"{self._name}: {escape_unprintable(_describe(error))}"
            # One write, which stderr passes on at the line's end: ranks share it, and print()
            # may write the end apart.
            sys.stderr.write(f"{message}\n")
            _leave_for_torchrun(message)
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            traceback.print_exception(error)

    def announce(
        self, session: Session, kind: object, error: BaseException | None, trace: object
    ) -> None:
        """Reports the cause to the other ranks, before they notice that their collectives break.
        Raises JobFailed in place of an error that is only the consequence of another rank's or
        process's end. To be pushed on an ExitStack."""
        if isinstance(error, RuntimeError | ActorError | TransportError):
            try:
                session.raise_if_lost(_CAUSE_TIMEOUT_S)
            except JobFailed as failure:
                raise failure from error
        is_late = isinstance(error, Exception) and _missed_deadline(error)
        if isinstance(error, UmbraError) and not is_late:
            self.report(error)
        if isinstance(error, Exception) and not isinstance(error, JobFailed):
            with contextlib.suppress(UmbraError):
                found: str = session.supervisor_call(
                    "fail_job",
                    f"rank {session.rank}",
                    f"{type(error).__name__}: {error}",
                    is_late,
                    timeout_s=_BUNDLE_LIMIT_S if is_late else 2.0,
                )
                if found:
                    error.add_note(found)
        if isinstance(error, UmbraError):
            self.report(error)

    def stopped(self, stop: StopNow) -> None:
        """Reports a stop at once. A signal mostly comes to all ranks, and one line is enough."""
        if self._rank == 0:
            sys.stderr.write(f"  {stop}\n")

    def job_failed(self, failure: JobFailed) -> None:
        """Starts the deadline for the end of this process: the job is lost."""
        self._failure = failure
        self._timer = threading.Timer(self._limit_s, self._end, (failure,))
        self._timer.daemon = True
        self._timer.start()

    def _end(self, failure: JobFailed) -> None:
        self.report(failure)
        os._exit(1)


def _missed_deadline(error: Exception) -> bool:
    """Whether something took too long. torch has no class of its own for a late collective."""
    if isinstance(error, UmbraError):
        return isinstance(error, DeadlineExceeded)
    return (
        isinstance(error, RuntimeError) and re.search("time(d )?out", str(error), re.I) is not None
    )


def _leave_for_torchrun(message: str) -> None:
    """Writes the file from which torchrun's own final report quotes the cause, in the format of
    torch.distributed.elastic's ErrorHandler, without importing torch."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    cause = {"message": message.splitlines()[0], "extraInfo": {"timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):  # stderr has the error already
        Path(path).write_text(json.dumps({"message": cause}))


def _describe(error: UmbraError) -> str:
    notes: list[str] = getattr(error, "__notes__", [])
    if isinstance(error, RemoteError):
        text = f"{error.remote_type.rpartition('.')[2]}: {error.remote_message}"
    else:
        text = f"{type(error).__name__}: {error}"
    return "\n".join([text, *notes])
