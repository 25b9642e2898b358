"""How a rank ends when something went wrong: it says why, once, and does not hang on.

    error in this rank  ──▶ tell(), then the others are told, then the session is left
    another one's error ──▶ job_failed() ──▶ the next call of the session raises it: tell()
                                         └─▶ limit_s later: tell(), and the process ends

A rank may be far from any call of the session when the job is lost: loading a model, waiting in
torch for a rank that never comes. It would hold up the others' end. And torchrun sends SIGTERM to
a rank that ends later than another: what it has to say it says before anything that takes time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Self

from umbra.runtime.errors import JobFailed, RemoteError, UmbraError
from umbra.runtime.escaping import escape_unprintable


class FatalErrorReporter:
    """Prints the error that ends this rank. Entered by the main thread; any thread may tell.

    Args:
        rank: -1 while unknown.
        limit_s: from the job's failure to the end of this process.
    """

    def __init__(self, rank: int, limit_s: float) -> None:
        self._who = f"rank {rank}" if rank >= 0 else "umbra"
        self._rank = rank
        self._limit_s = limit_s
        self._is_told = False
        self._telling = threading.Lock()
        self._failure: JobFailed | None = None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if error is not None and self._failure is not None:
            is_its_own = str(self._failure).startswith(f"rank {self._rank} failed")
            if not (is_its_own and isinstance(error, SystemExit)):
                self.tell(self._failure)

    def tell(self, error: UmbraError) -> None:
        """Prints it to stderr, and leaves it for torchrun, unless something was told before."""
        with self._telling:
            if self._is_told:
                return
            self._is_told = True
            said = f"{self._who}: {escape_unprintable(_describe(error))}"
            # One write: ranks share stderr, and print() may write the line's end apart.
            sys.stderr.write(f"{said}\n")
            sys.stderr.flush()
            _leave_for_torchrun(said)
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            traceback.print_exception(error)

    def job_failed(self, failure: JobFailed) -> None:
        """The job is lost: from now on this process has `limit_s` seconds."""
        self._failure = failure
        self._timer = threading.Timer(self._limit_s, self._end, (failure,))
        self._timer.daemon = True
        self._timer.start()

    def _end(self, failure: JobFailed) -> None:
        self.tell(failure)
        os._exit(1)


def _leave_for_torchrun(said: str) -> None:
    """torchrun's own report of the failure, which comes last, quotes the first line as the cause.

    The file's form is that of torch.distributed.elastic's ErrorHandler, without importing torch.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    cause = {"message": said.splitlines()[0], "extraInfo": {"timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):  # it has been told
        Path(path).write_text(json.dumps({"message": cause}))


def _describe(error: UmbraError) -> str:
    if isinstance(error, RemoteError):
        return f"{error.remote_type.rpartition('.')[2]}: {error.remote_message}"
    return f"{type(error).__name__}: {error}"
