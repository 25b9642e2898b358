"""Which error of a rank is printed, what the supervisor hears of it, and which ends the rank."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from typing import Any, cast

import pytest

from umbra.runtime.errors import (
    ActorDied,
    ConnectionLost,
    DataError,
    DeadlineExceeded,
    JobFailed,
    UmbraError,
)
from umbra.runtime.session.session import Session
from umbra.trainer.reporting.fatal_error_report import FatalErrorReporter
from umbra.trainer.world.signals import StopNow

OTHER = JobFailed("rank 0 failed: ValueError: no")
OWN = JobFailed("rank 3 failed: ValueError: no")
STOP = StopNow(signal.SIGTERM, "stopped by SIGTERM")
STOPPED = JobFailed("rank 0 failed: StopNow: stopped by SIGTERM")


class RankSession:
    """Knows that another rank has failed once it was asked for it, where it `is_lost`."""

    rank = 3

    def __init__(self, *, is_lost: bool, answer: str | UmbraError) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._is_lost = is_lost
        self._answer = answer

    def raise_if_lost(self, timeout_s: float) -> None:
        self.calls.append(("lost?", timeout_s))
        if self._is_lost:
            raise OTHER

    def supervisor_call(self, method: str, *arguments: object, timeout_s: float) -> str:
        self.calls.append((method, *arguments, timeout_s))
        if isinstance(self._answer, UmbraError):
            raise self._answer
        return self._answer


ASKED = ("lost?", 1.0)


def failed(text: str, is_late: bool = False) -> tuple[object, ...]:
    return "fail_job", "rank 3", text, is_late, 20.0 if is_late else 2.0


@pytest.mark.parametrize(
    ("error", "answer", "calls", "printed"),
    [
        (None, "", [], ""),
        (KeyboardInterrupt(), "", [], ""),
        (OTHER, "", [], "rank 3: JobFailed: rank 0 failed: ValueError: no\n"),
        (DataError("x"), "", [failed("DataError: x")], "rank 3: DataError: x\n"),
        (DataError("x"), ConnectionLost("y"), [failed("DataError: x")], "rank 3: DataError: x\n"),
        (DataError("x"), "later", [failed("DataError: x")], "rank 3: DataError: x\n"),
        (ValueError("x"), "seen", [failed("ValueError: x")], ""),
        (ValueError("timed out"), "", [failed("ValueError: timed out")], ""),
        (ActorDied("x"), "", [ASKED, failed("ActorDied: x")], "rank 3: ActorDied: x\n"),
        (RuntimeError("no NCCL"), "", [ASKED, failed("RuntimeError: no NCCL")], ""),
        (
            RuntimeError("Timed out waiting"),
            "seen",
            [ASKED, failed("RuntimeError: Timed out waiting", is_late=True)],
            "",
        ),
        (
            DeadlineExceeded("x"),  # a stack of each process is found before it is printed
            "stacks in dump.txt",
            [ASKED, failed("DeadlineExceeded: x", is_late=True)],
            "rank 3: DeadlineExceeded: x\nstacks in dump.txt\n",
        ),
    ],
)
def test_an_error_is_announced_once_with_what_the_supervisor_finds(
    error: BaseException | None,
    answer: str | UmbraError,
    calls: list[tuple[object, ...]],
    printed: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = RankSession(is_lost=False, answer=answer)

    announce(session, error)

    assert session.calls == calls
    assert capsys.readouterr().err == printed
    found = [answer] if calls and answer and not isinstance(answer, UmbraError) else []
    assert getattr(error, "__notes__", []) == found


def announce(session: RankSession, error: BaseException | None) -> None:
    reporter = FatalErrorReporter(session.rank, 600.0)
    reporter.announce(cast("Session", session), type(error), error, None)


@pytest.mark.parametrize("error", [RuntimeError("x"), ActorDied("x"), ConnectionLost("x")])
def test_an_error_that_follows_from_another_ranks_end_is_replaced_by_it(error: Exception) -> None:
    session = RankSession(is_lost=True, answer="")

    with pytest.raises(JobFailed) as raised:
        announce(session, error)

    assert (raised.value, raised.value.__cause__) == (OTHER, error)
    assert session.calls == [ASKED]


@pytest.mark.parametrize(
    ("rank", "failure", "error", "printed"),
    [
        (0, None, STOP, "  stopped by SIGTERM\n"),
        (3, None, STOP, ""),
        (0, STOPPED, STOP, "  stopped by SIGTERM\n"),
        (0, OTHER, STOP, ""),  # rank 0 has printed its own error
        (3, OTHER, STOP, f"rank 3: JobFailed: {OTHER}\n"),
        (3, OTHER, None, ""),
        (3, None, ValueError("x"), ""),
        (3, OTHER, ValueError("x"), f"rank 3: JobFailed: {OTHER}\n"),
        (3, OWN, SystemExit(1), ""),
        (3, OWN, ValueError("x"), f"rank 3: JobFailed: {OWN}\n"),
        (-1, OTHER, ValueError("x"), f"umbra: JobFailed: {OTHER}\n"),
    ],
)
def test_a_rank_of_a_lost_job_ends_by_the_cause(
    rank: int,
    failure: JobFailed | None,
    error: BaseException | None,
    printed: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reporter = FatalErrorReporter(rank, 600.0)

    def end() -> None:
        with reporter:
            if failure is not None:
                reporter.job_failed(failure)
            if error is not None:
                raise error

    if error is None:
        end()
    else:
        with pytest.raises(type(error)):
            end()

    assert capsys.readouterr().err == printed
    timers: list[Any] = [
        each for each in threading.enumerate() if isinstance(each, threading.Timer)
    ]
    for timer in timers:
        timer.join(10.0)
        assert not timer.is_alive(), "nothing ends the process any more"


@pytest.mark.process
def test_a_rank_of_a_lost_job_that_does_not_end_is_ended() -> None:
    code = (
        "import time\n"
        "from umbra.runtime.errors import JobFailed\n"
        "from umbra.trainer.reporting.fatal_error_report import FatalErrorReporter\n"
        "FatalErrorReporter(0, 0.01).job_failed(JobFailed('rank 1 failed'))\n"
        "time.sleep(60.0)\n"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)

    assert (ended.returncode, ended.stderr) == (1, "rank 0: JobFailed: rank 1 failed\n")
